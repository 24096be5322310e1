"""The decorator: a serial function becomes one that is planned for, and runs on, a mesh.

A call is traced once for its shapes, planned, compiled, and from then on is a call of that compiled
program. What is checked is checked on the way there; a later call that the program refuses comes back
here and is told in this library's words, never in JAX's.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered

from pypto_spmd.arguments import Arguments, Signature, Static, is_array, narrowed, signed
from pypto_spmd.call import Call, CallLayouts, CallOptions, inlining_mesh, program_of
from pypto_spmd.collectives.objective import OBJECTIVES
from pypto_spmd.collectives.plan import CommPlan
from pypto_spmd.collectives.planner import note_cheaper
from pypto_spmd.collectives.reconcile import Reconciliation, reconcile
from pypto_spmd.collectives.rules import changes
from pypto_spmd.collectives.telling import tell
from pypto_spmd.errors import Fault, listed, raise_faults, refuse, spmd_function
from pypto_spmd.executable import Executable
from pypto_spmd.given_layouts import GivenLayouts
from pypto_spmd.mesh import DeviceMesh, Topology, current_mesh
from pypto_spmd.mesh.topology import Link
from pypto_spmd.numpy_body import numpy_body, uses_no_library, uses_numpy
from pypto_spmd.sharding.spec import UNEVEN
from pypto_spmd.state import next_values, state_flags
from pypto_spmd.tracing import Traced, trace

LOWER_TO = ("shard_map", "jit")
MOST_DIMS = 8
"""No spec of a real program has more entries."""
"""What a plan can be lowered to."""


def spmd(
    function_or_mesh: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    *,
    mesh: DeviceMesh | Mesh | None = None,
    out_sharding: Any = None,
    parameter_shardings: Any = None,
    parameter_argnames: str | Iterable[str] = (),
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    objective: str = "standard",
    lower_to: str = "shard_map",
    strict: bool = False,
    uneven: str = "error",
    topology: Topology | Mapping[str, Link | str] | None = None,
) -> Any:
    """Makes a serial function run on a mesh, its communication planned.

    Written `@spmd`, `@spmd(mesh, in_shardings)` or `@spmd(mesh=..., ...)`, or called on a function.

    Args:
        function_or_mesh: the function, or the mesh.
        in_shardings: how the arguments lie: a spec (ShardingSpec, PartitionSpec, NamedSharding, AUTO or
            None) for each, or a pytree prefix of it; in a list in the order of the signature without
            static arguments, in a dict by name, or one spec for all. The planner lays out what has none.
            With `parameter_shardings`, a list with fewer entries than arguments is for those that are no
            parameters or train state, in order, and the last of these may be left out.
        out_shardings: how the results lie, likewise. A result that is the next value of a state argument
            and has no spec lies as that argument does.
        mesh: the mesh; by default that of the enclosing `with mesh:`, or that of the specs.
        out_sharding: the same as `out_shardings`.
        parameter_shardings: how parameters and the optimizer state that mirrors them lie, of arguments
            that are models or train states and have no spec in `in_shardings`, and of such states that
            the function makes: one spec, fitted to each array; rules, `[(pattern, spec), ...]`, the
            first whose regular expression is found in the array's path (`state/params/dense/kernel`);
            a function of path and array; a pytree prefix; a layout of `pypto_spmd.training`; or AUTO.
        parameter_argnames: arguments that are parameters, whatever their names and types are.
        static_argnums: places of arguments that are Python values, a program being made for each.
        static_argnames: names of the same.
        donate_argnums: places of arguments whose memory may be used for results.
        donate_argnames: names of the same.
        objective: "standard" for the textbook plan of textbook layouts, "bytes" for the fewest bytes.
        lower_to: "shard_map" to run exactly the plan, "jit" to give its layouts to XLA's partitioner.
        strict: whether a primitive without a rule is an error.
        uneven: "error" where a spec splits a dim that its mesh axes do not divide; "pad" to store such
            dims, and those that go with them, padded inside. At the boundary they have their true size,
            and are whole.
        topology: the mesh's links, instead of its own.

    Returns:
        The :class:`SPMDFunction`, or without a function a decorator that makes it.

    Raises:
        ShardingError: for options that can't be.

    Example:
        >>> mesh = DeviceMesh([[0, 1], [2, 3]], ["row", "col"])
        >>> @spmd(mesh, [PartitionSpec("row"), PartitionSpec(None, "col")], PartitionSpec("row", "col"))
        ... def gemm(a, b):
        ...     return a @ b
        >>> a, b = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 6), "float32")
        >>> gemm.plan(a, b).wire_bytes
        0
    """
    function = function_or_mesh if callable(function_or_mesh) else None
    positional_mesh = None if function is not None else function_or_mesh
    subject = "@spmd" if function is None else spmd_function(_name(function))
    faults: list[Fault] = []
    if positional_mesh is not None and mesh is not None:
        what = "the mesh is given twice, by place and by name."
        faults.append(Fault(what, "A function runs on one mesh.", "leave one of them out."))
    if out_shardings is not None and out_sharding is not None:
        what = "both out_shardings and out_sharding are given."
        why = "They are two names of one option."
        faults.append(Fault(what, why, "keep one of them."))
    used_mesh = _as_mesh(positional_mesh if mesh is None else mesh, faults)
    for option, value, known in (
        ("objective", objective, tuple(OBJECTIVES)),
        ("lower_to", lower_to, LOWER_TO),
        ("uneven", uneven, UNEVEN),
    ):
        if value not in known:
            choices = listed([repr(choice) for choice in known], "or")
            what, why = f"{option} is {value!r}.", f"It is one of {choices}."
            faults.append(Fault(what, why, f"use {option}={choices}."))
    raise_faults(subject, faults)
    layouts = GivenLayouts(
        in_shardings,
        out_shardings if out_sharding is None else out_sharding,
        parameter_shardings,
        frozenset(
            [parameter_argnames] if isinstance(parameter_argnames, str) else parameter_argnames
        ),
        uneven=uneven,
    )
    options = _Options(used_mesh, layouts, objective, lower_to, strict, topology)

    def decorate(function: Callable[..., Any]) -> SPMDFunction:
        if not callable(function):
            what = f"@spmd decorates a value of type {type(function).__name__}."
            fix = (
                "pass a function, and options by name: spmd(function, mesh=..., in_shardings=...)."
            )
            refuse("@spmd", what, "It decorates functions.", fix)
        found: list[Fault] = []
        signature = Signature(
            function,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            faults=found,
        )
        raise_faults(spmd_function(_name(function)), found)
        return SPMDFunction(function, signature, options)

    return decorate if function is None else decorate(function)


def _as_mesh(mesh: Any, faults: list[Fault]) -> DeviceMesh | None:
    if mesh is None or isinstance(mesh, DeviceMesh):
        return mesh
    if isinstance(mesh, Mesh):
        return DeviceMesh.from_jax(mesh)
    what = f"the mesh is of type {type(mesh).__name__}."
    why = "@spmd takes a function, or a mesh first: @spmd(mesh, in_shardings)."
    fix = "pass a DeviceMesh, and specs as in_shardings=... and out_shardings=...."
    faults.append(Fault(what, why, fix))
    return None


@dataclass(frozen=True, slots=True)
class _Options:
    """The options of `spmd`, checked."""

    mesh: DeviceMesh | None
    layouts: GivenLayouts
    objective: str
    lower_to: str
    strict: bool
    topology: Topology | Mapping[str, Link | str] | None


@dataclass(frozen=True, slots=True)
class _Hot:
    """The program of the last call, and when the next call may go straight to it.

    Args:
        run: the program.
        plain: whether a call without keywords may be tried without a look at it.
        positional: number of positional arguments.
        keywords: names of the keyword arguments, in the order of the call.
        statics: the static arguments.
        mesh: the mesh, if it is not the function's own.
        context: JAX's settings that the program was traced under.
        weak: which arrays are of a weak type, if a program for others could have other results; JAX's
            call doesn't tell them apart.
        types: types of the arrays, if NumPy's and JAX's arrays mean different rules.
    """

    run: Callable[..., Any]
    plain: bool
    positional: int
    keywords: tuple[str, ...]
    statics: tuple[tuple[int, Static], ...]
    mesh: DeviceMesh | None
    context: tuple[Any, ...]
    weak: tuple[bool, ...] | None
    types: tuple[type, ...] | None

    def values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """The arguments as the program takes them; None if the call is for another one."""
        if len(args) != self.positional or tuple(kwargs) != self.keywords:
            return None
        if self.mesh is not None and current_mesh() is not self.mesh:
            return None
        values = list(args)
        keywords = dict(kwargs)
        for place, static in reversed(self.statics):
            value = values.pop(place) if place >= 0 else keywords.pop(static.name)
            if Static(static.name, value) != static:
                return None
        values += keywords.values()
        if self.weak is None and self.types is None:
            return values
        leaves = jax.tree.leaves(values)
        if self.weak is not None and tuple(map(_is_weak, leaves)) != self.weak:
            return None
        if self.types is not None and tuple(map(type, leaves)) != self.types:
            return None
        return values


class Shardings(NamedTuple):
    """Where the arrays of one call lie.

    Args:
        arguments: for each argument that is not static, those by place first, a `NamedSharding` for each
            of its arrays.
        result: the same for the result.
    """

    arguments: tuple[Any, ...]
    result: Any


class SPMDFunction:
    """A serial function on a mesh; make one with :func:`spmd`.

    Calling it gives what the undecorated function gives, laid out on the mesh. `jax.jit`, `jax.grad`,
    `jax.vmap` and their like of it are those of the undecorated function, and are planned too. Inside
    another SPMD function it is inlined, its given layouts kept.
    """

    def __init__(
        self, function: Callable[..., Any], signature: Signature, options: _Options
    ) -> None:
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self.__name__ = _name(function)
        self._signature = signature
        self._options = options
        self._default_mesh = _default_mesh(options)
        self._programs: dict[Any, Executable] = {}
        self._last: Executable | None = None
        self._hot: _Hot | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on the mesh.

        Raises:
            ShardingError: for arguments, specs or code that can't be, all faults at once.
        """
        hot = self._hot
        if hot is not None and hot.context == _trace_context():
            try:
                if hot.plain and not kwargs:
                    return hot.run(*args)
                values = hot.values(args, kwargs)
                if values is not None:
                    return hot.run(*values)
            except (TypeError, ValueError):
                pass  # tracers, other shapes or other layouts: told apart below
            except jax.errors.JaxRuntimeError:
                if not _is_staged():
                    raise
        return self._call(args, kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> CommPlan:
        """The communication of a call, before anything is compiled.

        Args:
            *args: the arguments, or `jax.ShapeDtypeStruct`s in place of arrays.
            **kwargs: likewise.
        """
        return self._program(self._signature.bind(args, kwargs)).plan

    def explain(self, *args: Any, **kwargs: Any) -> None:
        """Prints the plan of a call the way a colleague would tell it; arguments as for `plan`."""
        call = self._program(self._signature.bind(args, kwargs)).call
        program = program_of(call)
        if self._options.objective != "bytes":
            cheapest = replace(call, options=replace(call.options, objective="bytes"))
            program = note_cheaper(program, program_of(cheapest))
        print(tell(program.plan))

    def shardings(self, *args: Any, **kwargs: Any) -> Shardings:
        """Where the arrays of a call lie, as planned; arguments as for `plan`.

        Example:
            >>> mesh = DeviceMesh.simulate((2, 4), ("data", "model"))
            >>> double = spmd(lambda x: 2 * x, mesh=mesh, in_shardings=PartitionSpec("data"))
            >>> (x,), result = double.shardings(jax.ShapeDtypeStruct((8, 3), "float32"))
            >>> x.spec, result.spec
            (P('data',), P('data',))
        """
        program = self._program(self._signature.bind(args, kwargs))
        return Shardings(program.argument_shardings, program.result_shardings)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The program of a call, to be compiled or looked at; arguments as for `plan`.

        Arrays that the function captures are its leading arguments.
        """
        return self._program(self._signature.bind(args, kwargs)).lowered

    def verify(self, *args: Any, **kwargs: Any) -> Reconciliation:
        """Compiles a call and holds its collectives against its plan; arguments as for `plan`.

        Returns:
            What matches what.

        Raises:
            VerificationError: if anything but the planned collectives runs.
        """
        if self._options.lower_to != "shard_map":
            refuse(
                self._subject(),
                f"verify() is asked for with lower_to={self._options.lower_to!r}.",
                "Then XLA's partitioner chooses the collectives, and the plan only says where arrays lie.",
                'use lower_to="shard_map".',
            )
        program = self._program(self._signature.bind(args, kwargs))
        text = program.compiled.as_text() or ""
        planned = program_of(program.call)
        found = reconcile(planned.plan.steps, text, planned.axis_sizes)
        found.check()
        return found

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method. `self` is static unless it is a pytree: what it holds is read at the first call."""
        return self if instance is None else BoundSPMDFunction(self, instance)

    def __repr__(self) -> str:
        return f"<{self._subject()}>"

    def _subject(self) -> str:
        return spmd_function(self.__name__)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call that may need a program, or is part of another one."""
        arguments = self._signature.bind(args, kwargs)
        program = self._program(arguments)
        with program.call.options.scope():
            arguments = replace(arguments, values=jax.tree.map(narrowed, arguments.values))
        leaves = jax.tree.leaves(arguments.values)
        operands = [*program.captured, *leaves]
        is_part = inlining_mesh() is not None or any(isinstance(o, Tracer) for o in operands)
        if is_part or _is_staged():
            results = program.call(*operands)
            return arguments.take(jax.tree.unflatten(program.result_tree, results))
        described = next((leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)), None)
        if described is not None:
            refuse(
                self._subject(),
                "it was called with a jax.ShapeDtypeStruct.",
                "That describes an array and holds no values to work on.",
                "pass arrays, or use .plan(...), .explain(...), .lower(...) or .verify(...).",
            )
        try:
            result = program.run(*arguments.values)
        except ValueError:  # committed to other devices or to another layout than planned
            result = program.run(*program.place(arguments.values))
        # A program is hot when it is the only one or runs twice in a row.
        is_hot = self._last is program or len(self._programs) == 1
        is_hot = is_hot and arguments.modules is None
        self._hot = self._as_hot(program, arguments, kwargs) if is_hot else None
        self._last = program
        return arguments.take(result)

    def _as_hot(self, program: Executable, arguments: Arguments, kwargs: Mapping[str, Any]) -> _Hot:
        leaves = jax.tree.leaves(arguments.values)
        weak = tuple(map(_is_weak, leaves)) if program.promotes else None
        types = tuple(map(type, leaves)) if self._may_be_numpy else None
        mesh = current_mesh() if self._default_mesh is None else None
        static_places = sum(place >= 0 for place, _ in arguments.statics)
        return _Hot(
            program.run,
            not (arguments.statics or kwargs or weak or types or mesh),
            arguments.positional + static_places,
            tuple(kwargs),
            arguments.statics,
            mesh,
            _trace_context(),
            weak,
            types,
        )

    @functools.cached_property
    def _may_be_numpy(self) -> bool:
        return uses_numpy(self.__wrapped__) or uses_no_library(self.__wrapped__)

    def _mesh(self) -> DeviceMesh:
        mesh = self._default_mesh or inlining_mesh() or current_mesh()
        if mesh is None:
            refuse(
                self._subject(),
                "it has no mesh.",
                "Where arrays lie is said on a mesh of devices.",
                "pass one, @spmd(mesh=DeviceMesh([0, 1], ['data'])), or call it inside `with mesh:`.",
            )
        outer = inlining_mesh()
        if outer is not None and not mesh.same_places(outer):
            refuse(
                self._subject(),
                f"it is on the mesh {mesh}, but is called inside an @spmd function on the mesh {outer}.",
                "A function is inlined into the one that calls it, and both run on one mesh.",
                "give both the same mesh, or call one after the other.",
            )
        return (
            mesh if self._options.topology is None else mesh.with_topology(self._options.topology)
        )

    def _program(self, arguments: Arguments) -> Executable:
        """The program of a call, made if there is none yet."""
        faults = [*arguments.faults(), *_mesh_faults()]
        mesh = self._mesh()
        if faults:
            raise_faults(self._subject(), [*faults, *self._spec_faults(arguments, mesh)])
        function = None
        if self._may_be_numpy:
            values = arguments.call(lambda *args, **kwargs: (args, kwargs), arguments.values)
            function = numpy_body(self.__wrapped__, *values)
        x64 = function is not None
        options = CallOptions(
            mesh, self._options.objective, self._options.lower_to, self._options.strict, self.__name__,
            arguments.leaf_names(), x64=x64, pads=self._options.layouts.uneven == "pad",
            rule_changes=changes(),
        )  # fmt: skip
        with options.scope():
            leaves, tree = jax.tree.flatten(arguments.values)
            forms = tuple(map(signed, leaves))
            # Programs of tracers of an outer function may hold them, so that these are made anew.
            modules = None if arguments.modules is None else arguments.modules.key
            context = _trace_context()
            key = (mesh, arguments.statics, modules, arguments.names, tree, forms, x64, context)
            program = self._programs.get(key)
            if program is None:
                program = self._make_program(
                    arguments, forms, function or self.__wrapped__, options, tree
                )
                if not any(isinstance(c, Tracer) for c in program.captured):
                    self._programs[key] = program
        return program

    def _spec_faults(self, arguments: Arguments, mesh: DeviceMesh) -> list[Fault]:
        """What is wrong with the specs of arguments of which some are no arrays."""

        def described(leaf: Any) -> jax.ShapeDtypeStruct:
            # Of what is no array nothing is known: empty dims, as many as wanted, fit every spec.
            shape = getattr(leaf, "shape", ()) if is_array(leaf) else (0,) * MOST_DIMS
            return jax.ShapeDtypeStruct(shape, getattr(leaf, "dtype", jax.numpy.float32))

        faults: list[Fault] = []
        described_values = jax.tree.map(described, arguments.values)
        names = self._signature.names
        self._options.layouts.of_arguments(arguments, described_values, names, mesh, faults)
        return faults

    def _make_program(
        self,
        arguments: Arguments,
        forms: Sequence[Any],
        function: Callable[..., Any],
        options: CallOptions,
        tree: Any,
    ) -> Executable:
        mesh = options.mesh
        described = jax.tree.unflatten(
            tree, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in forms]
        )
        faults: list[Fault] = []
        layouts = self._options.layouts
        in_specs = layouts.of_arguments(arguments, described, self._signature.names, mesh, faults)
        try:
            traced = trace(function, arguments, forms, self.__name__, mesh, pads=options.pads)
        except Exception:
            # Of a wrong spec and a failing function the spec is told first, being there first.
            raise_faults(self._subject(), faults)
            raise
        *states, result = traced.result if arguments.modules else (traced.result,)
        out_specs: list[PartitionSpec | None] = [None] * len(jax.tree.leaves(states))
        out_specs += layouts.of_result(result, mesh, faults)
        raise_faults(self._subject(), faults)
        leaves = jax.tree.leaves(arguments.values)
        in_specs = [
            _committed_spec(leaf, mesh) if spec is None else spec
            for leaf, spec in zip(leaves, in_specs, strict=True)
        ]
        return self._plan(arguments, described, traced, in_specs, out_specs, options, tree)

    def _plan(
        self,
        arguments: Arguments,
        described: Sequence[Any],
        traced: Traced,
        in_specs: list[PartitionSpec | None],
        out_specs: list[PartitionSpec | None],
        options: CallOptions,
        tree: Any,
    ) -> Executable:
        is_state = state_flags(
            arguments.names, described, traced.result, self._options.layouts.parameter_argnames
        )
        next_of = next_values(described, is_state, traced.result)
        outputs = [
            in_specs[next_of[i]] if spec is None and i in next_of else spec
            for i, spec in enumerate(out_specs)
        ]
        faults: list[Fault] = []
        outputs = self._options.layouts.of_new_states(
            arguments.names,
            described,
            in_specs,
            traced.result,
            outputs,
            next_of,
            options.mesh,
            faults,
        )
        raise_faults(self._subject(), faults)
        leaf_is_state = [
            flag
            for flag, value in zip(is_state, described, strict=True)
            for _ in jax.tree.leaves(value)
        ]
        captured = traced.captured
        call = Call(
            traced.jaxpr,
            CallLayouts(
                (*(_committed_spec(c, options.mesh) for c in captured), *in_specs), tuple(outputs)
            ),
            ((True,) * len(captured) + tuple(leaf_is_state)),
            replace(
                options,
                argument_names=traced.captured_names + options.argument_names,
                result_names=arguments.result_names(traced.result),
            ),
        )
        call = _tied(call, {i: len(captured) + j for i, j in next_of.items() if outputs[i] is None})
        donated = tuple(
            i for i, name in enumerate(arguments.names) if name in self._signature.donated
        )
        return Executable(call, captured, tree, jax.tree.structure(traced.result), donated)


class BoundSPMDFunction:
    """An SPMD function as the method of an object."""

    def __init__(self, function: SPMDFunction, instance: Any) -> None:
        self.__func__ = function
        self.__self__ = instance
        self.__wrapped__ = function.__wrapped__.__get__(instance)
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs on the mesh."""
        return self.__func__(self.__self__, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> CommPlan:
        """As `SPMDFunction.plan`."""
        return self.__func__.plan(self.__self__, *args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> None:
        """As `SPMDFunction.explain`."""
        self.__func__.explain(self.__self__, *args, **kwargs)

    def shardings(self, *args: Any, **kwargs: Any) -> Shardings:
        """As `SPMDFunction.shardings`."""
        return self.__func__.shardings(self.__self__, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """As `SPMDFunction.lower`."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def verify(self, *args: Any, **kwargs: Any) -> Reconciliation:
        """As `SPMDFunction.verify`."""
        return self.__func__.verify(self.__self__, *args, **kwargs)


def _name(function: Callable[..., Any]) -> str:
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    return getattr(inner, "__name__", type(inner).__name__)


def _default_mesh(options: _Options) -> DeviceMesh | None:
    """The mesh that is given, or of the enclosing `with mesh:`, or of the first spec that has one."""
    if options.mesh is not None:
        return options.mesh
    if (entered := current_mesh()) is not None:
        return entered
    mesh = options.layouts.mesh()
    return DeviceMesh.from_jax(mesh) if isinstance(mesh, Mesh) else mesh


def _committed_spec(array: Any, mesh: DeviceMesh) -> PartitionSpec | None:
    """The layout that an array has on the mesh already and that a program would have to move it from."""
    if isinstance(array, Tracer) or not isinstance(array, jax.Array | jax.ShapeDtypeStruct):
        return None
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or not getattr(array, "committed", True):
        return None
    other = sharding.mesh
    if not isinstance(other, Mesh) or tuple(other.shape.items()) != tuple(mesh.shape.items()):
        return None
    return sharding.spec if DeviceMesh.from_jax(other).same_places(mesh) else None


def _tied(call: Call, next_of: Mapping[int, int]) -> Call:
    """The call with results laid out as the state whose next value they are, where nobody says how.

    Both are the planner's to choose, but together: a state that comes back in another layout would be
    moved again by each call.
    """
    if not next_of:
        return call
    program = program_of(call)
    if all(program.outputs[i] == program.inputs[j] for i, j in next_of.items()):
        return call
    outputs = list(call.layouts.outputs)
    for result, operand in next_of.items():
        outputs[result] = program.inputs[operand].spec
    return replace(call, layouts=CallLayouts(call.layouts.inputs, tuple(outputs)))


_SETTINGS = operator.attrgetter(
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_prng_impl",
)


def _mesh_faults() -> list[Fault]:
    """What is wrong with JAX's own current mesh."""
    current = jax.sharding.get_abstract_mesh()
    if not current.explicit_axes:
        return []
    axes = listed([repr(axis) for axis in current.explicit_axes])
    return [
        Fault(
            f"it is called under jax.set_mesh of a mesh whose axes {axes} are Explicit.",
            "There JAX keeps each array's sharding in its type, and would have the function say what is "
            "planned.",
            "call it outside of jax.set_mesh, or make that mesh of AxisType.Auto.",
        )
    ]


def _trace_context() -> tuple[Any, ...]:
    """What changes what a function is traced to, or how it is planned: JAX's settings, and the rules."""
    return (*_SETTINGS(jax.config), changes())


def _is_staged() -> bool:
    """Whether the code that runs now is being traced by a function that is compiled, such as jax.jit's."""
    return isinstance(jax.numpy.zeros((), bool), Tracer)


def _is_weak(value: Any) -> bool:
    return bool(getattr(value, "weak_type", isinstance(value, bool | int | float | complex)))
