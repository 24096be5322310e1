"""Running a function on the parts that each device holds, in the middle of one on whole arrays."""

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import keystr

from pypto_spmd.collectives.source import said_here
from pypto_spmd.errors import Fault, listed, raise_faults, refuse
from pypto_spmd.numpy_body.array import NumpyArray
from pypto_spmd.placing import Place, mesh_of, parts_of
from pypto_spmd.sharding.resolve import is_spec, resolve, short_repr, spec_of
from pypto_spmd.sharding.spec import AUTO, axes_of, spec_text


def local(
    function: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    *,
    axis_names: Collection[str] | None = None,
    check_vma: bool = True,
) -> Callable[..., Any]:
    """A function on whole arrays that runs another one on the parts which each device holds.

    It is `jax.shard_map` on the mesh of the SPMD function that calls it. There it is part of the plan:
    arguments are brought to `in_specs`, and the collectives inside, `pypto_spmd.collectives` or those of
    `jax.lax`, are steps. Elsewhere the mesh is that of the specs or of an enclosing `with mesh:`.

    Args:
        function: what to run on the parts.
        in_specs: how the arguments are cut: a spec (PartitionSpec, ShardingSpec or NamedSharding) for each,
            or a pytree prefix of it. A device gets its part; of an axis that a spec does not name, the same.
        out_specs: how the results are put together, likewise. Along an axis that a spec does not name, all
            devices must give the same.
        axis_names: the mesh axes along which the function works on parts, all by default. On the others it
            is serial code, and planned.
        check_vma: whether JAX is to check that what `out_specs` take to be the same everywhere is.
            It can't know that of what `all_gather` gives, but makes derivatives cheaper.

    Raises:
        ShardingError: when called without a mesh, or with specs that do not fit the mesh, the arguments or
            the results, all faults at once.

    Example:
        >>> mesh = DeviceMesh([0, 1, 2, 3], ["data"])
        >>> @spmd(mesh)
        ... def total(x):
        ...     summed = lambda part: collectives.all_reduce(part.sum(), "data")
        ...     return local(summed, PartitionSpec("data"), PartitionSpec())(x)
        >>> total.plan(jax.ShapeDtypeStruct((8,), "float32")).steps[0].reason
        'written by hand'
    """
    name = getattr(function, "__name__", type(function).__name__)
    local_function = _Local(function, name, in_specs, out_specs, axis_names, check_vma)
    raise_faults(local_function.subject, local_function.kind_faults())
    return functools.wraps(function)(lambda *args: local_function(*args))


class _Local:
    """What `local` was given."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        in_specs: Any,
        out_specs: Any,
        axis_names: Collection[str] | None,
        check_vma: bool,
    ) -> None:
        self.function = function
        self.name = name
        self.in_specs = in_specs
        self.out_specs = out_specs
        self.axis_names = axis_names
        self.check_vma = check_vma

    @property
    def subject(self) -> str:
        """What errors are about: the function, and the user's line that runs now."""
        return said_here(f"local function '{self.name}'")

    def __call__(self, *args: Any) -> Any:
        mesh = mesh_of((self.in_specs, self.out_specs))
        if mesh is None:
            refuse(
                self.subject,
                "it has no mesh.",
                "A function runs on the parts that the devices of a mesh hold.",
                "call it in an @spmd function, or inside `with mesh:`, or give ShardingSpecs.",
            )
        leaves, tree = jax.tree.flatten(args)
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        specs, axes = self._checked(mesh, jax.tree.unflatten(tree, arrays))
        result_trees: list[Any] = []
        subject = self.subject  # inside of shard_map the line is not known

        def on_parts(*parts: Any) -> Any:
            results = self.function(*jax.tree.unflatten(tree, parts))
            results = jax.tree.map(jnp.asarray, results)
            self._check_results(mesh, results, subject)
            result_trees.append(jax.tree.structure(results))
            # In specs, lists and tuples stand for each other; JAX tells them apart.
            is_pair = isinstance(self.out_specs, list) and isinstance(results, tuple)
            return list(results) if is_pair else results

        mapped = jax.shard_map(
            on_parts,
            mesh=mesh.placed,
            in_specs=tuple(specs),
            out_specs=jax.tree.map(_bare, self.out_specs, is_leaf=is_spec),
            axis_names=axes,
            check_vma=self.check_vma,
        )
        try:
            results = jax.tree.leaves(mapped(*arrays))
        except ValueError as error:
            if "require replication" not in str(error):
                raise
            self._explain(error)
        if any(isinstance(leaf, NumpyArray) for leaf in leaves):
            results = map(NumpyArray, results)
        return jax.tree.unflatten(result_trees[-1], results)

    def kind_faults(self) -> list[Fault]:
        """What is no spec."""
        faults = []
        for label, specs in (("in_specs", self.in_specs), ("out_specs", self.out_specs)):
            for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
                if spec is not None and spec is not AUTO and is_spec(spec):
                    continue
                what = f"{label}{keystr(path)} is {short_repr(spec)}."
                why = "A function that runs on parts must be told how arrays are cut."
                fix = "give a PartitionSpec, PartitionSpec() for an array that is whole everywhere."
                faults.append(Fault(what, why, fix))
        return faults

    def _checked(self, mesh: Place, args: tuple[Any, ...]) -> tuple[list[Any], set[str]]:
        """A spec for each array of the arguments, and the axes on which the function is on parts."""
        faults: list[Fault] = []
        specs = resolve(
            self.in_specs,
            args,
            mesh.described,
            role="argument",
            names=_names(self.function, len(args)),
            label="in_specs",
            faults=faults,
        )
        every = mesh.described.axis_names
        axes = [a for a in every if a not in parts_of()]
        if self.axis_names is not None:
            unknown = [repr(a) for a in self.axis_names if a not in axes]
            if unknown:
                what = f"axis_names has {listed(unknown)}."
                why = f"The mesh axes to choose from are {listed([repr(a) for a in axes])}."
                faults.append(Fault(what, why, "name some of these."))
            axes = [a for a in axes if a in self.axis_names]
        labelled = jax.tree_util.tree_leaves_with_path(
            (self.in_specs, self.out_specs), is_leaf=is_spec
        )
        for (side, *path), entry in labelled:
            label = ("in_specs", "out_specs")[side.idx] + keystr(tuple(path))
            found: list[Fault] = []
            spec = spec_of(entry, mesh.described, label, found)
            faults += [fault for fault in found if fault not in faults]
            if spec is None:
                continue
            others = [repr(a) for a in axes_of(spec) if a not in axes]
            if others:
                what = f"{label} is {spec_text(spec)}."
                why = f"The function runs on parts along {listed([repr(a) for a in axes])} only."
                faults.append(Fault(what, why, f"leave out {listed(others)}."))
        raise_faults(self.subject, faults)
        return specs, set(axes)

    def _check_results(self, mesh: Place, results: Any, subject: str) -> None:
        faults: list[Fault] = []
        resolve(
            self.out_specs,
            results,
            mesh.described,
            role="result",
            label="out_specs",
            are_parts=True,
            faults=faults,
        )
        raise_faults(subject, faults)

    def _explain(self, error: ValueError) -> None:
        what = "out_specs leave out a mesh axis along which the result may differ."
        why = (
            "Then all devices along it must give the same, which JAX can't tell of this result: what "
            "all_gather gives, for one, is the same, but counts as what may differ."
        )
        fix = (
            "name the axis in out_specs, or all_reduce over it; or, where you know it to be the same, say "
            "check_vma=False."
        )
        try:
            refuse(self.subject, what, why, fix)
        except ValueError as told:
            raise told from error


def _bare(spec: Any) -> PartitionSpec:
    if isinstance(spec, PartitionSpec):
        return spec
    return getattr(spec, "partition_spec", None) or spec.spec


def _names(function: Callable[..., Any], count: int) -> Sequence[str] | None:
    """Names of a function's positional arguments, None if they can't be known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds]
    return names[:count] if len(names) >= count else None
