"""Whole NumPy programs, and NumPy's dtypes function by function, under tracing."""

import warnings

import jax
import numpy as np
import pytest
import scipy.special
from scipy.special import expit

from pypto_spmd.numpy_body import as_jax

RANDOM = np.random.default_rng(3)
A = RANDOM.normal(size=(4, 6))
V = RANDOM.normal(size=6)
X = A.astype(np.float32)
I32 = RANDOM.integers(1, 9, (4, 6)).astype(np.int32)
LABELS = RANDOM.integers(0, 4, size=6)


def check(fn, *args):
    with warnings.catch_warnings():
        # NumPy warns of what it computes (1 / 0), which XLA does not.
        warnings.simplefilter("ignore", RuntimeWarning)
        expected = jax.tree.map(np.asarray, fn(*map(np.array, args)))
    with jax.enable_x64(True):
        found = jax.tree.map(np.asarray, jax.jit(as_jax(fn))(*args))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (f.shape, f.dtype) == (e.shape, e.dtype)
        single = e.dtype in (np.float32, np.complex64)
        np.testing.assert_allclose(
            f, e, rtol=1e-4 if single else 1e-8, atol=1e-5 if single else 1e-10
        )


def kmeans_step(points, centers):
    distances = ((points[:, None, :] - centers[None]) ** 2).sum(-1)
    labels = np.argmin(distances, axis=1)
    new = np.zeros_like(centers)
    for k in range(len(centers)):
        mask = labels == k
        new[k] = np.sum(points * mask[:, None], axis=0) / np.maximum(mask.sum(), 1)
    return new, labels


def principal_components(x):
    centered = x - x.mean(axis=0)
    u, s, _ = np.linalg.svd(centered, full_matrices=False)
    return np.abs(u * s)


def convolution(image, kernel):
    h, w = kernel.shape
    out = np.zeros((image.shape[0] - h + 1, image.shape[1] - w + 1))
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = np.sum(image[i : i + h, j : j + w] * kernel)
    return out


def lstm(x, weight):
    def sigmoid(v):
        return 1 / (1 + np.exp(-v))

    h, c, states = np.zeros(3), np.zeros(3), []
    for t in range(x.shape[0]):
        i, f, o, g = np.split(np.concatenate([x[t], h]) @ weight, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        states.append(h)
    return np.array(states), c


def one_hot(labels):
    out = np.zeros((labels.size, 4))
    out[np.arange(labels.size), labels] = 1
    return out, np.eye(4)[labels]


def game_of_life(x):
    shifts = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if (a, b) != (0, 0)]
    neighbours = sum(np.roll(x, shift, (0, 1)) for shift in shifts)
    return (neighbours == 3) | ((x == 1) & (neighbours == 2))


def heat(x):
    u = x.copy()
    for _ in range(4):
        u[1:-1] += 0.1 * (u[2:] - 2 * u[1:-1] + u[:-2])
    return u


def swaps(x):
    y = np.array(x)
    y[0], y[1] = y[1], y[0]
    y[[2, 3]] = y[[3, 2]]
    return y


def gram_schmidt(x):
    q = np.zeros_like(x)
    for i in range(x.shape[1]):
        v = x[:, i].copy()
        for j in range(i):
            v -= np.dot(q[:, j], x[:, i]) * q[:, j]
        q[:, i] = v / np.linalg.norm(v)
    return q


def attention(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    hidden = np.triu(np.ones(scores.shape[-2:], dtype=bool), k=1)
    scores = np.where(hidden, -np.inf, scores)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)) @ v


def mandelbrot(c):
    z, count = np.zeros_like(c), np.zeros(c.shape, dtype=int)
    for _ in range(5):
        inside = np.abs(z) < 2
        z = np.where(inside, z * z + c, z)
        count += inside
    return count


def cross_entropy(logits, labels):
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return -log_p[np.arange(len(labels)), labels].mean()


def gradient_descent(w, x, y):
    for _ in range(3):
        w = w - 0.1 * 2 * np.dot(x.T, x @ w - y) / len(x)
    return w


def low_pass(x):
    spectrum = np.fft.rfft(x)
    spectrum[3:] = 0
    return np.fft.irfft(spectrum, n=len(x))


def masks(x):
    y = x.copy()
    y[y[:, 0] > 0] = 0
    y[np.isnan(y)] = -1
    return y


def casts_on_assignment(x):
    y = np.zeros(6, dtype=int)
    y[:] = x * 9
    y[0] = 2.9
    return y


def updates(x):
    y = np.abs(x)
    y[1] **= 2
    y[2] //= 0.5
    y[3] %= 0.3
    y[4] /= 3
    mask = np.zeros(6, dtype=bool)
    mask |= x > 0
    mask ^= True
    return y, mask


def known_memory_is_shared(x):
    y = np.zeros(6)
    z = y.reshape(2, 3)
    z[0, 0] = 5
    y[3] = 2
    return y * x, z


def closure_that_counts(x):
    n = 0

    def scaled():
        nonlocal n
        n += 1
        return np.abs(x) * n

    return scaled() + scaled()


def starred(x):
    first, *rest = x
    return np.stack(rest) * first, [np.exp(row) for row in x]


def guarded(x):
    try:
        with np.errstate(all="ignore"):
            return np.linalg.inv(x @ x.T) / np.log(np.abs(x[0, 0]))
    except np.linalg.LinAlgError:
        return x


def lists(x):
    return np.sum([x[0], x[1], 2.0]), np.max([x, x + 1], axis=0), np.mean((x[0], x[1]))


def keywords(i):
    return np.sum(a=i), np.mean(a=i, axis=0), np.clip(i, a_min=2, a_max=None)


def special_functions(x):
    return expit(x), scipy.special.logsumexp(x, axis=0), scipy.special.gammaln(np.abs(x))


PROGRAMS = {
    kmeans_step: [RANDOM.normal(size=(20, 3)), RANDOM.normal(size=(4, 3))],
    principal_components: [A],
    convolution: [A, RANDOM.normal(size=(2, 2))],
    lstm: [RANDOM.normal(size=(4, 2)), RANDOM.normal(size=(5, 12))],
    one_hot: [LABELS],
    game_of_life: [(A > 0).astype(int)],
    heat: [V],
    swaps: [A],
    gram_schmidt: [RANDOM.normal(size=(4, 3))],
    attention: [A, A, A],
    mandelbrot: [A + 1j * A],
    cross_entropy: [A.T, LABELS],
    gradient_descent: [V, A, A[:, 0]],
    low_pass: [V],
    masks: [A],
    casts_on_assignment: [V],
    updates: [V],
    known_memory_is_shared: [V],
    closure_that_counts: [V],
    starred: [A],
    guarded: [A],
    lists: [V],
    keywords: [I32],
    special_functions: [V],
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program_gives_what_numpy_gives(program):
    check(program, *PROGRAMS[program])


def on_integers(i):
    return {
        "bits": (np.gcd(i, 4), np.left_shift(i, 1), i >> 1, i & 1, np.invert(i), -i),
        "arithmetic": (i / i, np.floor_divide(i, 2), np.mod(i, 3), i * 1.0, i * np.float32(1)),
        "sums": (np.cumsum(i), i.sum(), np.prod(i), np.trace(i), np.ptp(i), i.max()),
        "means": (np.mean(i), np.std(i), np.median(i), np.average(i), i.mean(axis=0)),
        "functions": (np.sqrt(i), np.sin(i), np.exp2(i), np.linalg.norm(i), i + True),
        "products": (np.dot(i[0], i[0]), i @ i.T, np.outer(i, 2), np.inner(i, i)),
    }


def on_float32(x):
    double = np.float64(1)
    return {
        "mixed": (x * 1, x / 3, x + I32, x @ A.T, x**2, x**I32, x * double, 1 - x),
        "choices": (np.where(x > 0, x, double), np.where(x > 0, x, 0), np.clip(x, 0, double)),
        "extremes": (np.maximum(x, double), np.maximum(x, 0), np.fmin(x, double)),
        "statistics": (np.median(x), np.percentile(x, 30), np.quantile(x, 0.3), np.cov(x)),
        "sums": (np.cumsum(x), np.mean(x, dtype=np.float64), np.trapezoid(x), np.std(x)),
        "products": (np.dot(x, 2.0), np.dot(2, x), np.tensordot(x, x.T, 1), np.outer(x, x)),
        "joined": (np.append(x, 1.0), np.concatenate([x, I32]), np.stack([x, 2 * x])),
        "grids": (
            np.linspace(x[0, 0], 1, 3),
            np.full_like(x, 2.5),
            np.interp(x[0], [0, 1], [0, 1]),
        ),
        "signals": (np.convolve(x[0], [1.0, 2]), np.fft.fft(x), np.sinc(x), np.angle(x)),
        "algebra": (np.linalg.det(x @ x.T), np.linalg.eigvalsh(x @ x.T), np.gradient(x, axis=0)),
        "counts": (np.histogram(x, bins=3), np.argsort(x), np.count_nonzero(x)),
    }


def on_any_number(x):
    return (
        (np.hypot(x, 1), np.arctan2(x, 2), np.copysign(1, x), np.logaddexp(x, x), np.expm1(x)),
        (np.cbrt(x), np.deg2rad(x), np.heaviside(x, 0.5), np.float_power(x, 2), np.fmod(x, 2)),
        (np.trunc(x), np.rint(x), np.reciprocal(x), np.i0(x), np.ldexp(x, 2), np.nansum(x)),
        (np.piecewise(x, [x < 0, x >= 0], [lambda v: -v, lambda v: v * 2]), np.insert(x, 1, 5)),
        (np.delete(x, 2), np.diff(x, prepend=0), np.lexsort((x, x)), np.isin(x, [1, 2])),
    )


@pytest.mark.parametrize(
    ("fn", "arg"), [(on_integers, I32), (on_float32, X), (on_any_number, V), (on_any_number, X[0])]
)
def test_dtypes_are_those_of_numpy(fn, arg):
    check(fn, arg)


def test_derivatives():
    def loss(w, x, y):
        return np.mean((np.tanh(np.dot(x, w)) - y) ** 2)

    w, y, h = V, A[:, 0], 1e-6
    with jax.enable_x64(True):
        gradient = jax.grad(as_jax(loss))(w, A, y)
    steps = h * np.eye(6)
    numeric = [(loss(w + s, A, y) - loss(w - s, A, y)) / (2 * h) for s in steps]
    np.testing.assert_allclose(gradient, numeric, rtol=1e-6)
