"""The train steps of the examples, in each of their layouts: as @spmd functions, and as plain `jax.jit`."""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.stages import Compiled

from pypto_spmd import DeviceMesh, spmd
from pypto_spmd.nnx_body import split_modules
from pypto_spmd.training import Layout, Policy

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


@dataclass(frozen=True)
class ExampleStep:
    """One train step in one layout.

    Args:
        example: the name of the example.
        name: the name of the layout.
        function: the serial step.
        states: its models and train states, arrays described.
        batch: its other arguments, likewise.
        layout: the layout.
        mesh: the mesh.
    """

    example: str
    name: str
    function: Callable[..., Any]
    states: tuple[Any, ...]
    batch: tuple[Any, ...]
    layout: Layout
    mesh: DeviceMesh

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All arguments."""
        return (*self.states, *self.batch)

    def planned(self, objective: str = "standard") -> Any:
        """The step as an @spmd function."""
        return spmd(
            self.function,
            mesh=self.mesh,
            in_shardings=[self.layout.batch] * len(self.batch),
            parameter_shardings=self.layout,
            donate_argnums=range(len(self.states)),
            objective=objective,
        )

    def compiled(self) -> Compiled:
        """The compiled @spmd function."""
        return self.planned().lower(*self.arguments).compile()

    def jitted(self) -> Compiled:
        """Plain `jax.jit` of the step, arguments and results laid out as in the @spmd function."""
        arguments, results = self.planned().shardings(*self.arguments)
        values, modules = split_modules(self.arguments)
        function = self.function
        if modules is not None:
            function = lambda *values: modules.call(values, lambda of: self.function(*of))  # noqa: E731
        step = jax.jit(
            function,
            in_shardings=arguments,
            out_shardings=results,
            donate_argnums=range(len(self.states)),
        )
        return step.lower(*values).compile()


def options(description: str) -> argparse.Namespace:
    """What the command line says: which examples, which layouts, on which mesh."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--examples", default=",".join(_STEPS), help="which (default: all)")
    parser.add_argument("--layouts", default="", help="which (default: all that an example has)")
    return parser.parse_args()


def example_steps(examples: str, layouts: str) -> Iterator[ExampleStep]:
    """The steps of some examples on `data=4 × model=2`, in some of their layouts, or all."""
    mesh = DeviceMesh.simulate((4, 2), ("data", "model"))
    for example in examples.split(","):
        module = importlib.import_module(f"train_{example}")
        function, states, batch = _STEPS[example](module)
        for name, layout in module.LAYOUTS.items():
            if not layouts or name in layouts.split(","):
                yield ExampleStep(
                    example, name, function, states, batch, layout(*mesh.axis_names), mesh
                )


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _digits(size: int, *shape: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return _array(size, *shape), _array(size, dtype=jnp.int32)


def _text(module: Any) -> tuple[jax.ShapeDtypeStruct]:
    return (_array(module.BATCH, module.CONTEXT + 1, dtype=jnp.uint8),)


def _mlp(module: Any) -> Any:
    images, labels = _digits(module.BATCH, 64)
    state = jax.eval_shape(module.init, jax.random.key(0))
    return module.train_step, (state,), ({"images": images, "labels": labels},)


def _gpt(module: Any) -> Any:
    state = jax.eval_shape(module.init, jax.random.key(0))
    return module.train_step, (state,), _text(module)


def _moe(module: Any) -> Any:
    states = nnx.eval_shape(lambda: module.init(jax.random.key(0)))
    return module.train_step, states, _text(module)


def _resnet(module: Any) -> Any:
    model = nnx.eval_shape(lambda: module.init(jax.random.key(0)))
    return module.train_step, (model,), _digits(module.BATCH, 8, 8, 1)


def _vit(module: Any) -> Any:
    state = jax.eval_shape(module.init, jax.random.key(0))
    step = module.make_train_step(Policy.named("float32"))
    return step, (state,), _digits(module.BATCH, 8, 8, 1)


_STEPS = {"mlp": _mlp, "resnet": _resnet, "vit": _vit, "gpt": _gpt, "moe": _moe}
