"""How long the labelling solver takes on a transformer's training step, by depth.

The problem is synthetic but shaped like the real one: per equation one variable for how it is split,
per tensor one for how it is laid out, tables of what moving an operand costs, a forward and a
backward ladder, and an optimizer's equations for every parameter behind one global norm.

    python benchmarks/bench_elimination.py [layers ...]

Times are of the CPU, since the solver is one thread.
"""

import itertools
import math
import statistics
import sys
import time

import numpy as np

from pypto_spmd.collectives.solver import min_plus
from pypto_spmd.collectives.solver.elimination import Problem, intern_table, solve
from pypto_spmd.collectives.solver.min_marginals import min_marginals
from pypto_spmd.collectives.solver.network import Network

DEVICES = 8
TOKENS, HIDDEN, WIDE = 8192, 768, 3072
REPEATS = 5


class Program:
    """Straight-line equations over tensors, turned into a labelling problem."""

    def __init__(self, sets):
        self.sets = sets
        self.shapes = []
        self.sizes = []
        self.tables = []
        self.variables = []
        self.tape = []
        self.inputs = []

    def layouts(self, tensor):
        """Sets of layouts that a tensor may exist in: whole, split by a dim, partial, or two of them."""
        dims = range(len(self.shapes[tensor]))
        single = [("R",), *[(dim,) for dim in dims], ("P",)]
        if not self.sets:
            return single
        pairs = [("P", "R"), *[("P", dim) for dim in dims], *itertools.combinations(dims, 2)]
        return single + pairs

    def build(self, tensor, old, new):
        """What it costs to have a set of layouts, given one."""
        return min(
            sum(self.move(tensor, a, b) for a, b in itertools.pairwise((old, *order)))
            for order in itertools.permutations(new)
        )

    def move(self, tensor, old, new):
        """What changing a tensor's layout costs, in wire bytes."""
        size = 4.0 * np.prod(self.shapes[tensor], dtype=float)
        share = size * (DEVICES - 1) / DEVICES
        if old == new:
            return 0.0
        if old == "P":
            return 2 * share if new == "R" else share
        if new == "P":
            return 0.0 if old == "R" else np.inf
        if old == "R":
            return 0.0
        return share + 1e-3 if new == "R" else share / DEVICES + 2e-3

    def variable(self, size):
        self.sizes.append(size)
        return len(self.sizes) - 1

    def tensor(self, *shape, layouts=None):
        self.shapes.append(shape)
        tensor = len(self.shapes) - 1
        self.variables.append(self.variable(len(self.layouts(tensor))))
        if layouts is not None:
            cost = [
                min(self.build(tensor, given, layout) for given in layouts)
                for layout in self.layouts(tensor)
            ]
            self.tables.append(((self.variables[tensor],), intern_table(cost)))
            self.inputs.append(self.variables[tensor])
        return tensor

    def equation(self, operands, shape, choices, work=None):
        """Adds an equation; a choice is the operands' layouts and the result's."""
        choice = self.variable(len(choices))
        result = self.tensor(*shape)
        for position, operand in enumerate(operands):
            self.tables.append(
                (
                    (choice, self.variables[operand]),
                    self.table(
                        lambda has, wants, operand=operand: min(
                            self.move(operand, layout, wants) for layout in has
                        ),
                        [c[position] for c in choices],
                        operand,
                    ),
                )
            )
        self.tables.append(
            (
                (choice, self.variables[result]),
                self.table(
                    lambda has, made: self.build(result, made, has),
                    [c[-1] for c in choices],
                    result,
                ),
            )
        )
        if work is not None:
            self.tables.append(((choice,), intern_table(work)))
        return result

    def table(self, cost, of_choice, tensor):
        rows = [[cost(has, layout) for has in self.layouts(tensor)] for layout in of_choice]
        return intern_table(rows)

    def elementwise(self, *operands, linear=False):
        shape = max((self.shapes[operand] for operand in operands), key=len)
        choices = []
        for layout in ("R", *range(len(shape))):
            choices.append(
                [layout if len(self.shapes[operand]) == len(shape) else "R" for operand in operands]
                + [layout]
            )
        if linear:
            choices.append(["P"] * len(operands) + ["P"])
        return self.equation(operands, shape, choices)

    def reduce(self, operand, dim):
        shape = self.shapes[operand]
        rest = tuple(size for index, size in enumerate(shape) if index != dim)
        choices = [["R", "R"], ["P", "P"], [dim, "P"]]
        choices += [[d, d - (d > dim)] for d in range(len(shape)) if d != dim]
        return self.equation([operand], rest, choices)

    def broadcast(self, operand, shape, dim):
        choices = [["R", "R"], ["P", "P"], ["R", dim]]
        choices += [[d - (d > dim), d] for d in range(len(shape)) if d != dim]
        return self.equation([operand], shape, choices)

    def matmul(self, left, right, contract=(1, 0)):
        i, k = contract
        m, n = self.shapes[left][1 - i], self.shapes[right][1 - k]
        choices = [["R", "R", "R"], [1 - i, "R", 0], ["R", 1 - k, 1], [i, k, "P"]]
        choices += [["P", "R", "P"], ["R", "P", "P"]]
        operand_bytes = 4.0 * (np.prod(self.shapes[left]) + np.prod(self.shapes[right]))
        whole = 0.4 * operand_bytes * (DEVICES - 1) / DEVICES
        return self.equation([left, right], (m, n), choices, [whole, 0, 0, 0, whole, whole])

    def problem(self):
        return Problem(tuple(self.sizes), tuple(self.tables))


def training_step(layers, sets=False):
    """A transformer's forward and backward pass and AdamW behind clipping by the global norm."""
    p = Program(sets)
    parameters, gradients = [], {}

    def parameter(*shape):
        parameters.append(state(*shape))
        return parameters[-1]

    def state(*shape):
        return p.tensor(*shape, layouts=("R", *range(len(shape))))

    def chain(x, length):
        for step in range(length):
            x = p.elementwise(x, linear=step % 2 == 0)
        return x

    def norm(x, backward):
        scale = parameter(HIDDEN)
        mean = p.broadcast(chain(p.reduce(x, 1), 3), (TOKENS, HIDDEN), 1)
        centred = p.elementwise(x, mean, linear=True)
        spread = p.broadcast(
            chain(p.reduce(p.elementwise(centred, centred), 1), 4), (TOKENS, HIDDEN), 1
        )
        normal = p.elementwise(centred, spread)
        y = p.elementwise(normal, p.broadcast(scale, (TOKENS, HIDDEN), 0))

        def pull(dy):
            gradients[scale] = p.reduce(p.elementwise(dy, normal), 0)
            dn = p.elementwise(dy, p.broadcast(scale, (TOKENS, HIDDEN), 0))
            inner = p.broadcast(
                chain(p.reduce(p.elementwise(dn, normal), 1), 3), (TOKENS, HIDDEN), 1
            )
            return p.elementwise(p.elementwise(dn, inner, linear=True), spread)

        backward.append(pull)
        return y

    def dense(x, width, backward):
        weight, bias = parameter(p.shapes[x][1], width), parameter(width)
        out = p.matmul(x, weight)
        y = p.elementwise(out, p.broadcast(bias, p.shapes[out], 0), linear=True)

        def pull(dy):
            gradients[bias] = p.reduce(dy, 0)
            gradients[weight] = p.matmul(x, dy, contract=(0, 0))
            return p.matmul(dy, weight, contract=(1, 1))

        backward.append(pull)
        return y

    def gelu(x, backward):
        inner = chain(p.elementwise(x, x), 5)
        y = p.elementwise(x, inner)

        def pull(dy):
            return p.elementwise(
                p.elementwise(dy, inner), chain(p.elementwise(dy, x), 6), linear=True
            )

        backward.append(pull)
        return y

    def attention(x, backward):
        back = [[], [], []]
        heads = [dense(x, HIDDEN, part) for part in back]
        scores = chain(p.elementwise(heads[0], heads[1]), 2)
        top = p.broadcast(p.reduce(scores, 1), (TOKENS, HIDDEN), 1)
        weights = chain(p.elementwise(scores, top, linear=True), 2)
        y = p.elementwise(weights, heads[2])

        def pull(dy):
            dv, dw = p.elementwise(dy, weights), p.elementwise(dy, heads[2])
            ds = chain(p.elementwise(dw, scores), 3)
            parts = [p.elementwise(ds, heads[1]), p.elementwise(ds, heads[0]), dv]
            parts = [pull_part[0](d) for pull_part, d in zip(back, parts, strict=True)]
            total = p.elementwise(parts[0], parts[1], linear=True)
            return p.elementwise(total, parts[2], linear=True)

        backward.append(pull)
        return y

    def residual(x, branch):
        inside = []
        y = p.elementwise(x, branch(x, inside), linear=True)

        def pull(dy):
            d = dy
            for step in reversed(inside):
                d = step(d)
            return p.elementwise(dy, d, linear=True)

        return y, pull

    x = p.tensor(TOKENS, HIDDEN, layouts=(0,))
    pulls = []
    for _ in range(layers):
        for branch in (
            lambda x, back: dense(attention(norm(x, back), back), HIDDEN, back),
            lambda x, back: dense(gelu(dense(norm(x, back), WIDE, back), back), HIDDEN, back),
        ):
            x, pull = residual(x, branch)
            pulls.append(pull)
    d = chain(x, 3)
    for pull in reversed(pulls):
        d = pull(d)

    total = None
    for weight in parameters:
        square = p.elementwise(gradients[weight], gradients[weight])
        while p.shapes[square]:
            square = p.reduce(square, 0)
        total = square if total is None else p.elementwise(total, square, linear=True)
    clip = chain(total, 4)
    for weight in parameters:
        shape = p.shapes[weight]
        gradient = p.elementwise(gradients[weight], clip)
        first = state(*shape)
        second = state(*shape)
        first = p.elementwise(chain(first, 1), chain(gradient, 1), linear=True)
        second = p.elementwise(chain(second, 1), chain(p.elementwise(gradient, gradient), 1))
        step = p.elementwise(chain(first, 2), chain(second, 4))
        decayed = p.elementwise(step, chain(weight, 1), linear=True)
        p.elementwise(weight, chain(decayed, 2), linear=True)
    return p


def seconds(call):
    start = time.process_time()
    call()
    return time.process_time() - start


def report(name, program):
    problem = program.problem()
    cold = []
    for _ in range(REPEATS):
        min_plus.forget()
        cold.append(seconds(lambda: solve(problem)))
    warm = [seconds(lambda: solve(problem)) for _ in range(REPEATS)]
    network = Network(problem)
    network.eliminate_all(10**9)
    largest = max(math.prod(map(len, step.domains)) for step in network.steps)
    solution = solve(problem)
    asked = program.inputs[:200]
    marginals_s = seconds(lambda: min_marginals(problem, asked))
    print(
        f"{name}: {len(problem.domain_sizes)} variables, {len(problem.tables)} tables"
        f" ({len({table for _, table in problem.tables})} distinct),"
        f" {'exact' if solution.exact else 'approximate'}, largest table {largest};"
        f" {statistics.median(cold):.2f} s, remembered {statistics.median(warm):.2f} s,"
        f" min-marginals of {len(asked)} inputs {marginals_s:.2f} s",
        flush=True,
    )


def main():
    for layers in [int(argument) for argument in sys.argv[1:]] or [3, 12, 24]:
        report(f"{layers} layers", training_step(layers))
        report(f"{layers} layers with layout sets", training_step(layers, sets=True))


if __name__ == "__main__":
    main()
