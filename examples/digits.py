"""scikit-learn's digits as images, in two parts: to train on, and to test."""

import numpy as np
from sklearn.datasets import load_digits

TEST_IMAGES = 360
SEED = 0

Part = tuple[np.ndarray, np.ndarray]


def digits() -> tuple[Part, Part]:
    """The images, (number, 8, 8, 1) from 0 to 1, and labels, (number,), of the two parts."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(labels))
    images = (images[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels[order].astype(np.int32)
    test = images[:TEST_IMAGES], labels[:TEST_IMAGES]
    return (images[TEST_IMAGES:], labels[TEST_IMAGES:]), test
