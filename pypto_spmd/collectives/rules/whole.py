"""Primitives without a rule, and why: one table.

Most are no matter of rules: the graph takes calls and loops apart before it asks for any. The others run
whole. `ELSEWHERE` has those that no graph of a user's function holds.
"""

from collections.abc import Iterator, Mapping

CALL = "a call or a loop: what it runs is planned, equation by equation"
ONCE = "acts once for a call, on the first device, with the whole value"
MUTABLE = "reads or writes a mutable array, which no plan follows"
CUDNN = "cuDNN's fused attention, which JAX itself deals out on GPUs; jax.nn's own has rules"


def _each(*groups: tuple[str, str]) -> Iterator[tuple[str, str]]:
    for reason, names in groups:
        for name in names.split():
            yield name, reason


WITHOUT_RULE: Mapping[str, str] = dict(
    _each(
        (
            CALL,
            "call call_hi_primitive checkpoint closed_call composite cond core_call custom_jvp_call "
            "custom_lin custom_linear_solve custom_partitioning custom_vjp_call custom_vjp_call_jaxpr "
            "custom_vmap_call eval_jaxpr jit linear_call pjit remat remat2 scan shard_map spmd_call while",
        ),
        ("orders effects by a token, which is no array", "after_all create_token"),
        ("asks for a layout, which the planner grants", "reshard sharding_constraint"),
        ("a product over devices of a hand-written region", "all_reduce_product"),
        ("its sizes are known only when it runs", "ragged_all_to_all"),
        (
            "stands for its namesake where shard_map checks what varies over devices",
            "all_gather_invariant psum_invariant pvary",
        ),
        (ONCE, "debug_callback debug_print io_callback"),
        ("is a Python function of whole arrays, of which nothing is known", "pure_callback"),
        ("gives other numbers on every call, so that no two devices would agree", "rng_uniform"),
        ("raises an error unless checkify has made it a value", "check"),
        ("keeps a value that nobody reads", "dce_sink"),
        (MUTABLE, "addupdate empty_ref free_ref freeze get new_ref run_scoped run_state swap"),
        (CUDNN, "dot_product_attention_fwd dot_product_attention_fwd_wrapper"),
        (CUDNN, "dot_product_attention_bwd dot_product_attention_bwd_wrapper"),
        (CUDNN, "dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper"),
        (CUDNN, "dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper"),
        ("calls a cuDNN graph of its own", "cudnn_fusion"),
        (
            "a fused product of GPUs; lax.scaled_dot has a rule",
            "scaled_matmul scaled_matmul_wrapper",
        ),
        ("calls a program that was exported, whatever its layouts are", "call_exported"),
    )
)

ELSEWHERE: Mapping[str, str] = dict(
    _each(
        (
            "stands in kernels only",
            "accum_grad_in_ref core_map delay get_global masked_load masked_swap mpmd_map multiple_of "
            "num_programs pin program_id semaphore_read semaphore_signal semaphore_wait stage unpin "
            "unreachable",
        ),
        (
            "is bound only while JAX transforms or lowers a program",
            "broadcast_to call_hi_primitive_linearized create_linear custom_jvp_call_jaxpr "
            "from_edtype infeed iota_2x32_shape jaxpr_call outfeed philox2x32 philox4x32 reciprocal "
            "remat_opt threefry4x32 tie to_edtype xla_metadata_call zeros_like",
        ),
        ("stands in exported programs only", "dim_as_value dimension_size shape_assertion"),
        (
            "is half of a collective, or one of JAX's own types of what varies over devices",
            "all_gather_done all_gather_reduced all_gather_reduced_start all_gather_start all_to_all_done "
            "all_to_all_start pbroadcast_done pbroadcast_dynamic pbroadcast_start ppermute_done "
            "ppermute_start preduced psum_done psum_invariant_start psum_start reduce_scatter_done "
            "reduce_scatter_start reduced_vary_cast reduced_vary_cast_p unreduced_pmax unreduced_pmin "
            "unreduced_psum unreduced_psum_start unreduced_reduce_scatter unreduced_reduce_scatter_start "
            "vary_unreduced_cast vary_unreduced_cast_p psend precv",
        ),
        (
            "is an experiment of JAX's with boxes and logs",
            "box_get box_set get_variable log_extend log_read new_box new_log new_variable relayout "
            "set_variable",
        ),
    )
)
"""Primitives that no graph of a user's function holds."""


def is_looked_into(name: str) -> bool:
    """Whether the primitive called `name` is taken apart, so that a rule of it would never be asked for."""
    return WITHOUT_RULE.get(name) == CALL
