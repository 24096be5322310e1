"""A matrix product on a mesh of 2×2 devices: its plan, and those of three other layouts of it.

Run it as it is; no accelerator is needed:

    python examples/gemm.py
"""
# ruff: noqa: RET504  (the first half is quoted as it was published)

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # four devices, simulated, whatever this machine has

import numpy as np

from pypto_spmd import DeviceMesh, PartitionSpec, ShardingSpec, spmd

# fmt: off
# 初始化 2x2 设备网格
mesh = DeviceMesh(
    devices=[[0, 1], [2, 3]],
    axis_names=["row", "col"]
)

@spmd(
    mesh=mesh,
    in_shardings=[
        ShardingSpec(mesh, PartitionSpec("row", None)),    # A: 按行切分
        ShardingSpec(mesh, PartitionSpec(None, "col"))     # B: 按列切分
    ],
    out_sharding=ShardingSpec(mesh, PartitionSpec("row", "col"))  # C: 行列切分
)
def gemm_spmd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """SPMD GEMM: 自动处理分片与通信"""
    # 每个设备持有 A 的行块和 B 的列块
    c_local = np.dot(a, b)  # 局部计算

    # 自动 AllReduce 聚合结果（因 C 是行列切分）
    return c_local

# 全局矩阵
A_global = np.random.randn(1024, 512)
B_global = np.random.randn(512, 2048)

# PyPTO 自动分片输入并分发
C_global = gemm_spmd(A_global, B_global)

# 验证结果
C_ref = np.dot(A_global, B_global)
assert np.allclose(C_global, C_ref, atol=1e-5)
# fmt: on

# Every device has the rows of A and the columns of B that its block of C needs: nothing is sent.
print("A by rows, B by columns, C by both:")
gemm_spmd.explain(A_global, B_global)
assert np.asarray(C_global).dtype == np.float64

# The same serial product with other layouts of A, B and C, and the collectives each of them needs.
LAYOUTS: dict[str, tuple[tuple[PartitionSpec, PartitionSpec, PartitionSpec], dict[str, int]]] = {
    "The contracted dim split, C whole": (
        (PartitionSpec(None, "col"), PartitionSpec("col", None), PartitionSpec()),
        {"all_reduce": 1},
    ),
    "The contracted dim split, C split over the same axis": (
        (PartitionSpec(None, "col"), PartitionSpec("col", None), PartitionSpec("col", None)),
        {"reduce_scatter": 1},
    ),
    "A by rows, the weights B split for storage only": (
        (PartitionSpec("row", None), PartitionSpec("row", None), PartitionSpec("row", None)),
        {"all_gather": 1},
    ),
}


def matmul(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """C = A B, serial."""
    return np.dot(x, weights)


worst_error = float(np.abs(np.asarray(C_global) - C_ref).max())
sent = 0.0
for title, ((a_spec, b_spec, c_spec), collectives) in LAYOUTS.items():
    gemm = spmd(mesh=mesh, in_shardings=(a_spec, b_spec), out_shardings=c_spec)(matmul)
    print(f"\n{title}:")
    gemm.explain(A_global, B_global)
    plan = gemm.plan(A_global, B_global)
    plan.assert_counts(**collectives)
    worst_error = max(
        worst_error, float(np.abs(np.asarray(gemm(A_global, B_global)) - C_ref).max())
    )
    sent += plan.wire_bytes

print(
    f"\nlargest error of the four products: {worst_error:.1e} (float64); "
    f"sent by each device in all: {sent / 2**20:.0f} MB"
)
assert worst_error < 1e-10
