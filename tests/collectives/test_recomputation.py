"""What is computed twice is known, and matched where XLA runs it once."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pypto_spmd.collectives import lowering
from pypto_spmd.collectives.graph import build_graph
from pypto_spmd.collectives.planner import make_program
from pypto_spmd.collectives.recomputation import originals
from pypto_spmd.collectives.reconcile import reconcile
from pypto_spmd.mesh import DeviceMesh

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def gradient(w, x):
    def layer(w):
        return jnp.sin(jnp.tanh(x @ w) @ w)

    return (jax.grad(lambda w: (jax.checkpoint(layer)(w) ** 2).sum())(w),)


def test_originals():
    graph = build_graph(jax.make_jaxpr(gradient)(X, X))
    names = {t: e.name for e, _ in graph.equations() for t in e.outputs}
    found = {(names[t], names.get(o, "argument")) for t, o in originals(graph).items()}
    assert ("tanh", "tanh") in found
    assert ("dot_general", "dot_general") in found
    assert ("optimization_barrier", "argument") in found
    assert all(name in ("optimization_barrier", other) for name, other in found)


def test_nothing_is_recomputed_without_checkpoint():
    graph = build_graph(jax.make_jaxpr(lambda w, x: jnp.tanh(x @ w))(X, X))
    assert originals(graph) == {}


def test_a_step_that_xla_merges_with_its_recomputation_is_matched():
    mesh = DeviceMesh.simulate((2, 4), ("a", "b"))
    program = make_program(
        build_graph(jax.make_jaxpr(gradient)(X, X)),
        mesh=mesh,
        inputs=[PartitionSpec("b"), PartitionSpec(None, "b")],
        outputs=[PartitionSpec("b")],
        is_state=[False, False],
    )
    again = [s for s in program.plan.steps if s.recomputes is not None]
    assert again
    for step in again:
        first = program.plan.steps[step.recomputes]
        assert (first.kind, first.axes, first.elements) == (step.kind, step.axes, step.elements)
    compiled = jax.jit(lowering.shard_mapped(program, program.mesh.jax_mesh)).lower(X, X).compile()
    found = reconcile(program.plan.steps, compiled.as_text(), dict(mesh.shape))
    assert found.ok, str(found)
    merged = [m for m in found.matched if not m.collectives]
    assert merged
    assert str(merged[0]).endswith(
        f": no instruction (merged with step {again[0].recomputes}, which it recomputes)"
    )


def test_a_missing_step_is_no_recomputation_of_another():
    mesh = DeviceMesh.simulate((2, 4), ("a", "b"))
    program = make_program(
        build_graph(jax.make_jaxpr(lambda x: (x.sum(0),))(X)),
        mesh=mesh,
        inputs=[PartitionSpec("b")],
        outputs=[PartitionSpec()],
        is_state=[False],
    )
    assert len(reconcile(program.plan.steps, "", dict(mesh.shape)).missing) == 1
