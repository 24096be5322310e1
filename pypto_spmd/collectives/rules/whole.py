"""Primitives without a rule, and why: one table.

Most are no matter of rules: the graph takes calls and loops apart before it asks for any, and collectives
stand in hand-written `shard_map`s only. The others run whole.
"""

from collections.abc import Mapping

CALL = "a call or a loop: what it runs is planned, equation by equation"
COLLECTIVE = "a collective: stands in hand-written shard_maps only, which run as they are written"
MUTABLE = "reads or writes a mutable array, which only the kernel that it stands in has"
TOKEN = "orders effects by a token, which is no array"
LAYOUT = "asks for a layout, which the planner grants"

WITHOUT_RULE: Mapping[str, str] = {
    "after_all": TOKEN,
    "create_token": TOKEN,
    "all_gather": COLLECTIVE,
    "all_gather_invariant": COLLECTIVE,
    "all_to_all": COLLECTIVE,
    "axis_index": COLLECTIVE,
    "pbroadcast": COLLECTIVE,
    "pmax": COLLECTIVE,
    "pmin": COLLECTIVE,
    "ppermute": COLLECTIVE,
    "psend": COLLECTIVE,
    "precv": COLLECTIVE,
    "psum": COLLECTIVE,
    "psum_invariant": COLLECTIVE,
    "pvary": COLLECTIVE,
    "ragged_all_to_all": COLLECTIVE,
    "reduce_scatter": COLLECTIVE,
    "call": CALL,
    "checkpoint": CALL,
    "closed_call": CALL,
    "cond": CALL,
    "core_call": CALL,
    "custom_jvp_call": CALL,
    "custom_lin": CALL,
    "custom_linear_solve": "a call: its solver is planned, its other functions serve derivatives",
    "custom_vjp_call": CALL,
    "custom_vjp_call_jaxpr": CALL,
    "custom_vmap_call": CALL,
    "eval_jaxpr": CALL,
    "jit": CALL,
    "pjit": CALL,
    "remat": CALL,
    "remat2": CALL,
    "scan": CALL,
    "spmd_call": CALL,
    "while": CALL,
    "get": MUTABLE,
    "swap": MUTABLE,
    "addupdate": MUTABLE,
    "reshard": LAYOUT,
    "sharding_constraint": LAYOUT,
    "debug_callback": "fires once for a call, on the first device, with the whole value",
    "debug_print": "fires once for a call, on the first device, with the whole value",
    "io_callback": "fires once for a call, on the first device, with the whole value",
    "pure_callback": "is a Python function of whole arrays, of which nothing is known",
    "rng_uniform": "gives other numbers on every call, so that no two devices would agree",
    "infeed": "reads from the host, in an order that devices do not share",
    "outfeed": "writes to the host, in an order that devices do not share",
}


def is_looked_into(name: str) -> bool:
    """Whether the primitive called `name` is taken apart, so that a rule of it would never be asked for."""
    return WITHOUT_RULE.get(name, "").startswith("a call")
