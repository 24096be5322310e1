"""The labelling solver against all labellings of small problems, and on long ladders."""

import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from pypto_spmd.collectives.solver import min_plus, network
from pypto_spmd.collectives.solver.elimination import (
    Infeasible,
    Problem,
    SearchFailed,
    intern_table,
    solve,
)
from pypto_spmd.collectives.solver.min_marginals import min_marginals
from pypto_spmd.collectives.solver.network import Network


def random_problem(rng, *, forbidden=0.1, max_variables=7, max_arity=3):
    """A small problem with ties: costs are small integers."""
    count = int(rng.integers(1, max_variables + 1))
    sizes = tuple(int(size) for size in rng.integers(1, 5, size=count))
    tables = []
    for _ in range(int(rng.integers(1, 3 * count + 1))):
        arity = int(rng.integers(1, min(max_arity, count) + 1))
        scope = tuple(int(variable) for variable in rng.permutation(count)[:arity])
        costs = rng.integers(0, 6, size=[sizes[variable] for variable in scope]).astype(float)
        costs[rng.random(costs.shape) < forbidden] = math.inf
        tables.append((scope, intern_table(costs)))
    return Problem(sizes, tuple(tables))


def all_costs(problem):
    """The cost of every labelling, one axis per variable."""
    costs = np.zeros(problem.domain_sizes)
    for scope, table in problem.tables:
        order = sorted(range(len(scope)), key=scope.__getitem__)
        shape = [1] * costs.ndim
        for axis in order:
            shape[scope[axis]] = table.shape[axis]
        costs = costs + table.array.transpose(order).reshape(shape)
    return costs


def ladder(layers, rng, *, labels=4, sides=3):
    """The same random layer over and over: `sides` variables, joined within and to the next layer."""
    across = [intern_table(rng.integers(0, 50, (labels, labels)).astype(float)) for _ in range(4)]
    tables = []
    for layer in range(layers):
        here = range(sides * layer, sides * (layer + 1))
        tables += [((a, b), across[0]) for a, b in itertools.pairwise(here)]
        if layer + 1 < layers:
            tables += [((a, a + sides), across[1 + a % 3]) for a in here]
    return Problem((labels,) * (sides * layers), tuple(tables))


@pytest.mark.parametrize("seed", range(400))
def test_cost_is_that_of_brute_force(seed):
    problem = random_problem(np.random.default_rng(seed), forbidden=(0.0, 0.1, 0.3)[seed % 3])
    best = all_costs(problem).min()
    if best == math.inf:
        with pytest.raises(Infeasible) as caught:
            solve(problem)
        check_conflict(problem, caught.value.variables)
        return
    solution = solve(problem)
    assert solution.exact
    assert solution.cost == solution.lower_bound == best
    assert all_costs(problem)[solution.labels] == best


def check_conflict(problem, variables):
    """The variables can't be labelled together, but without any one of them the others can."""

    def best_of(members):
        part = tuple(entry for entry in problem.tables if set(entry[0]) <= set(members))
        return all_costs(Problem(problem.domain_sizes, part)).min()

    assert best_of(variables) == math.inf
    for variable in variables:
        assert best_of(set(variables) - {variable}) < math.inf


@pytest.mark.parametrize("seed", range(150))
def test_min_marginals_are_those_of_brute_force(seed):
    rng = np.random.default_rng(1000 + seed)
    problem = random_problem(rng, forbidden=(0.0, 0.05, 0.2)[seed % 3])
    costs = all_costs(problem)
    count = costs.ndim
    asked = sorted(int(v) for v in rng.permutation(count)[: int(rng.integers(1, count + 1))])
    if costs.min() == math.inf:
        with pytest.raises(Infeasible):
            min_marginals(problem, asked)
        return
    marginals = min_marginals(problem, asked)
    assert list(marginals) == asked
    for variable, marginal in marginals.items():
        others = tuple(axis for axis in range(count) if axis != variable)
        np.testing.assert_array_equal(marginal, costs.min(axis=others))


@pytest.mark.parametrize("seed", range(60))
def test_min_marginals_of_a_problem_too_wide_are_costs_of_labellings(seed):
    rng = np.random.default_rng(2000 + seed)
    problem = random_problem(rng, forbidden=0.0)
    costs = all_costs(problem)
    variable = costs.ndim - 1
    marginal = min_marginals(problem, [variable], max_entries=1)[variable]
    least = costs.min(axis=tuple(range(variable)))
    assert (marginal >= least).all()
    assert (marginal < math.inf).all()


@pytest.mark.parametrize("seed", range(120))
def test_bounds_of_a_problem_too_wide_bracket_the_optimum(seed):
    problem = random_problem(np.random.default_rng(3000 + seed), forbidden=(0.0, 0.1)[seed % 2])
    costs = all_costs(problem)
    try:
        solution = solve(problem, max_entries=(1, 4)[seed // 2 % 2])
    except Infeasible:
        assert costs.min() == math.inf
    except SearchFailed:
        assert seed % 2
    else:
        assert solution.lower_bound <= costs.min() <= solution.cost
        assert costs[solution.labels] == solution.cost


def test_approximate_solution_is_not_called_exact():
    # Three labels around a triangle of "must differ", and a fourth variable that all must differ from.
    differ = intern_table(10.0 * np.eye(3))
    scopes = tuple(itertools.combinations(range(4), 2))
    problem = Problem((3,) * 4, tuple((scope, differ) for scope in scopes))
    assert solve(problem).cost == 10.0
    solution = solve(problem, max_entries=3)
    assert not solution.exact
    assert solution.lower_bound == 0.0
    assert solution.cost == 10.0


@pytest.mark.parametrize("seed", range(10))
def test_a_possible_labelling_is_found_where_it_is_too_wide(seed):
    rng = np.random.default_rng(4000 + seed)
    side, labels = 7, 5
    hidden = rng.integers(labels, size=(side, side))
    tables = []
    for here in itertools.product(range(side), repeat=2):
        for there in ((here[0] + 1, here[1]), (here[0], here[1] + 1)):
            if max(there) < side:
                costs = rng.integers(0, 100, size=(labels, labels)).astype(float)
                costs[rng.random((labels, labels)) < 0.5] = math.inf
                costs[hidden[here], hidden[there]] = 99.0
                scope = (here[0] * side + here[1], there[0] * side + there[1])
                tables.append((scope, intern_table(costs)))
    problem = Problem((labels,) * side**2, tuple(tables))
    best = solve(problem).cost
    solution = solve(problem, max_entries=20)
    assert solution.lower_bound <= best <= solution.cost == problem.cost(solution.labels) < math.inf


def test_order_goes_along_a_wide_ladder():
    sides, layers = 6, 30
    problem = ladder(layers, np.random.default_rng(0), labels=6, sides=sides)
    solution = solve(problem, max_entries=6 ** (sides + 1))
    assert solution.exact
    approximate = solve(problem, max_entries=6 ** (sides - 1))
    assert approximate.lower_bound <= solution.cost <= approximate.cost


@pytest.mark.parametrize("seed", range(60))
def test_no_more_than_negligible_is_lost_by_settling_hubs(seed, monkeypatch):
    monkeypatch.setattr(network, "EASY_ENTRIES", 4)
    monkeypatch.setattr(network, "HUB_DEGREE", 1)
    problem = random_problem(np.random.default_rng(5000 + seed), forbidden=(0.0, 0.1)[seed % 2])
    costs = all_costs(problem)
    best = costs.min()
    if best < math.inf:
        solution = solve(problem, negligible=2.5)
        assert best <= solution.cost == solution.lower_bound <= best + 2.5
        assert costs[solution.labels] == solution.cost
        marginal = min_marginals(problem, [0], negligible=2.5)[0]
        least = costs.min(axis=tuple(range(1, costs.ndim)))
        assert (least <= marginal).all()
        assert (marginal <= least + 2.5).all()


def test_hubs_that_make_next_to_no_difference_do_not_widen_a_ladder():
    rng = np.random.default_rng(0)
    rungs = ladder(30, rng)
    count, hubs = len(rungs.domain_sizes), 8
    tables = list(rungs.tables)
    whole = np.zeros((4, 2))
    whole[0, 1] = 1000.0  # label 0 of a rung needs label 0 of the hub, which others do without
    for hub in range(count, count + hubs):
        tables.append(((hub,), intern_table([1e-6, 0.0])))
        tables += [((v, hub), intern_table(whole)) for v in range(hub % 2, count, 2)]
    problem = Problem((*rungs.domain_sizes, *[2] * hubs), tuple(tables))
    assert not solve(problem, max_entries=2000).exact
    solution = solve(problem, max_entries=2000, negligible=1e-4)
    assert solution.exact
    assert solve(rungs).cost <= solution.cost <= solve(rungs).cost + 1e-4


def test_search_that_finds_nothing_says_so():
    differ = intern_table([[math.inf, 0.0], [0.0, math.inf]])
    problem = Problem((2,) * 3, tuple((pair, differ) for pair in ((0, 1), (1, 2), (0, 2))))
    with pytest.raises(
        SearchFailed, match=r"^the problem is too wide, and no labelling of finite cost was found$"
    ):
        solve(problem, max_entries=2)


def test_equal_tables_are_one_object():
    first = intern_table(np.array([[0.0, 1.0], [math.inf, -0.0]]))
    assert intern_table([[0, 1], [math.inf, 0]]) is first
    assert intern_table([[0, 1, math.inf, 0]]) is not first
    with pytest.raises(ValueError, match="read-only"):
        first.array[0, 0] = 1.0


def test_small_differences_survive_big_costs():
    big = 1e12
    tables = tuple(
        ((variable,), intern_table([big + variable, big + variable])) for variable in range(50)
    )
    tie_breakers = (((7,), intern_table([1e-6, 0.0])), ((8,), intern_table([0.0, 1e-9])))
    coupled = (((7, 8), intern_table([[0.0, 2e-6], [2e-6, 0.0]])),)
    solution = solve(Problem((2,) * 50, tables + tie_breakers + coupled))
    assert solution.labels[7:9] == (1, 1)


def test_of_equal_labels_the_lowest_is_taken():
    zeros = intern_table(np.zeros((3, 3)))
    problem = Problem((3, 3, 3), (((0, 1), zeros), ((2, 1), zeros)))
    assert solve(problem).labels == (0, 0, 0)
    equal = intern_table(np.where(np.eye(3) > 0, 0.0, 1.0))
    problem = Problem((3, 3, 3), (((0, 1), equal), ((2, 1), equal)))
    assert solve(problem).labels == (0, 0, 0)


def test_infeasible_names_the_smallest_set_near_the_trouble():
    rng = np.random.default_rng(5)
    problem = ladder(20, rng)
    must_differ = intern_table(np.where(np.eye(4) > 0, math.inf, 0.0))
    only_two = intern_table([0.0, 1.0, math.inf, math.inf])
    trouble = tuple(((v,), only_two) for v in (10, 17, 30)) + tuple(
        (pair, must_differ) for pair in ((10, 17), (17, 30), (30, 10))
    )
    problem = Problem(problem.domain_sizes, problem.tables + trouble)
    with pytest.raises(Infeasible) as caught:
        solve(problem)
    assert caught.value.variables == (10, 17, 30)
    assert str(caught.value) == (
        "the tables of variables 10, 17, 30 allow no combination of their labels"
    )


def test_problem_is_validated():
    table = intern_table(np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"^variable 1 has no labels$"):
        Problem((2, 0), ())
    with pytest.raises(
        ValueError, match=r"^the table of variables \(1, 0\) has shape \(2, 3\), not \(3, 2\)$"
    ):
        Problem((2, 3), (((1, 0), table),))
    with pytest.raises(ValueError, match=r"^scope \(0, 0\) repeats a variable$"):
        Problem((2,), (((0, 0), intern_table(np.zeros((2, 2)))),))
    with pytest.raises(ValueError, match=r"^a cost table must not hold nan or -inf$"):
        intern_table([math.nan])


def test_long_ladder_is_eliminated_with_small_tables():
    layers, sides, labels = 400, 3, 4
    problem = ladder(layers, np.random.default_rng(0), labels=labels, sides=sides)
    working = Network(problem)
    assert working.eliminate_all(10**6)
    assert max(math.prod(map(len, step.domains)) for step in working.steps) <= labels ** (
        2 * sides - 1
    )
    # The same by dynamic programming over whole layers.
    tables = dict(problem.tables)
    combinations = list(itertools.product(range(labels), repeat=sides))
    inside = np.array(
        [
            sum(tables[v, v + 1].array[c[v], c[v + 1]] for v in range(sides - 1))
            for c in combinations
        ]
    )
    between = np.array(
        [
            [
                sum(tables[v, v + sides].array[c[v], d[v]] for v in range(sides))
                for d in combinations
            ]
            for c in combinations
        ]
    )
    least = inside
    for _ in range(layers - 1):
        least = (least[:, None] + between).min(axis=0) + inside
    assert solve(problem).cost == least.min()


def test_results_do_not_depend_on_what_is_remembered():
    problem = ladder(30, np.random.default_rng(3))
    solution = solve(problem)
    assert solve(problem) == solution
    min_plus.forget()
    assert solve(problem) == solution


SCRIPT = """
import numpy as np
from tests.collectives.test_elimination import ladder, random_problem
from pypto_spmd.collectives.solver.elimination import Infeasible, solve
print(solve(ladder(50, np.random.default_rng(1))).labels)
for seed in range(30):
    problem = random_problem(np.random.default_rng(seed), forbidden=0.0)
    print(solve(problem).labels, solve(problem, max_entries=2).labels)
"""


def test_labels_are_the_same_in_every_process():
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
