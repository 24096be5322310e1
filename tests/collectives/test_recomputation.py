"""What is computed twice is known, and matched where XLA runs it once."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pypto_spmd.collectives import lowering
from pypto_spmd.collectives.flatten import build_graph
from pypto_spmd.collectives.planner import make_program
from pypto_spmd.collectives.recomputation import originals
from pypto_spmd.collectives.reconcile import reconcile
from pypto_spmd.mesh import DeviceMesh

X = np.linspace(-1, 1, 512, dtype=np.float32).reshape(8, 64)
W = np.linspace(1, -1, 512, dtype=np.float32).reshape(64, 8)


def gradient(w, x):
    def layer(w):
        return jnp.sin(jnp.tanh(x @ w))

    return (jax.grad(lambda w: (jax.checkpoint(layer)(w) ** 2).sum())(w),)


def test_originals():
    graph = build_graph(jax.make_jaxpr(gradient)(W, X))
    names = {t: e.name for e, _ in graph.equations() for t in e.outputs}
    found = {(names[t], names.get(o, "argument")) for t, o in originals(graph).items()}
    assert ("tanh", "tanh") in found
    assert ("dot_general", "dot_general") in found
    assert ("optimization_barrier", "argument") in found
    assert all(name in ("optimization_barrier", other) for name, other in found)


def test_nothing_is_recomputed_without_checkpoint():
    graph = build_graph(jax.make_jaxpr(lambda w, x: jnp.tanh(x @ w))(W, X))
    assert originals(graph) == {}


def test_a_recomputed_step_is_matched_where_xla_runs_it_once():
    mesh = DeviceMesh.simulate((2, 4), ("a", "b"))
    program = make_program(
        build_graph(jax.make_jaxpr(gradient)(W, X)),
        mesh=mesh,
        inputs=[PartitionSpec("b"), PartitionSpec(None, "b")],
        outputs=[PartitionSpec("b")],
        is_state=[False, False],
    )
    first, again = program.plan.steps
    assert (first.recomputes, again.recomputes) == (None, 0)
    assert (first.kind, first.axes, first.elements) == (again.kind, again.axes, again.elements)
    mapped = jax.jit(lowering.shard_mapped(program, program.mesh.jax_mesh))
    assert reconcile(program.plan.steps, mapped.lower(W, X).compile().as_text(), mesh.shape).ok
    # As a compiler has it that merges equal operations before it puts AllReduces together.
    once = """
ENTRY %main (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %r = f32[8,8]{1,0} all-reduce(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add, STEP
}
"""
    for index in (0, 1):
        kept = once.replace("STEP", f'frontend_attributes={{spmd_step="{index}"}}')
        found = reconcile(program.plan.steps, kept, mesh.shape)
        assert found.ok, str(found)
        assert str(found.matched[1]) == (
            f"step {1 - index} (AllReduce over 'b', 64 elements): no instruction (merged with step "
            f"{index}, which does the same)"
        )


def test_a_step_that_recomputes_nothing_may_not_be_missing():
    mesh = DeviceMesh.simulate((2, 4), ("a", "b"))
    program = make_program(
        build_graph(jax.make_jaxpr(lambda x: (x.sum(0),))(X)),
        mesh=mesh,
        inputs=[PartitionSpec("b")],
        outputs=[PartitionSpec()],
        is_state=[False],
    )
    assert len(reconcile(program.plan.steps, "", mesh.shape).missing) == 1
