"""The articles' snippets run as they were published, but for what is wrong in them.

Each snippet stands here word for word; what is changed before it runs is listed, with the reason. The models
and optimizers of the articles are PyTorch's, which JAX can't trace: they are written in flax nnx.
"""

import runpy

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from pypto_spmd import PartitionSpec, spmd, training
from pypto_spmd.testing import assert_spmd_equal

PACKAGE = ("from pypto import", "from pypto_spmd import")  # the package's name here

GEMM = '''
# spmd_gemm.py
from pypto import DeviceMesh, ShardingSpec, PartitionSpec, spmd

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
'''  # noqa: W293

GEMM_MAIN = """
# main.py
import numpy as np

# 全局矩阵
A_global = np.random.randn(1024, 512)
B_global = np.random.randn(512, 2048)

# PyPTO 自动分片输入并分发
C_global = gemm_spmd(A_global, B_global)

# 验证结果
C_ref = np.dot(A_global, B_global)
assert np.allclose(C_global, C_ref, atol=1e-5)
"""

COMPUTE = """
# 伪代码
@spmd(mesh, sharding_spec)
def compute(x):
    # x 在每个设备上是全局张量的一个分片
    y = matmul(x, w)  # 自动处理分片间通信
    return y
"""

RESNET = """
# data_parallel_resnet.py
import torch
import torch.nn as nn
from pypto import DeviceMesh, ShardingSpec, PartitionSpec, spmd

# 定义设备网格（1D: 仅数据并行）
mesh = DeviceMesh(devices=[0, 1, 2, 3], axis_names=["data"])

class ResNetModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3)
        self.fc = nn.Linear(64, 1000)
    
    def forward(self, x):
        x = self.conv(x)
        x = torch.flatten(x, 1)
        return self.fc(x)

model = ResNetModel()

# 定义分片：输入按 "data" 轴切分，模型参数全复制
input_sharding = ShardingSpec(mesh, PartitionSpec("data", None, None, None))
param_sharding = ShardingSpec(mesh, PartitionSpec())  # 无分片 = 全复制

@spmd(
    mesh=mesh,
    in_shardings=[input_sharding],
    out_sharding=param_sharding,  # 输出（loss）全聚合
    parameter_shardings=param_sharding  # 模型参数分片
)
def train_step(model, data, labels):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    
    # 前向
    outputs = model(data)
    loss = nn.CrossEntropyLoss()(outputs, labels)
    
    # 反向
    loss.backward()
    
    # PyPTO 自动插入 AllReduce 同步梯度!
    optimizer.step()
    optimizer.zero_grad()
    
    return loss
"""  # noqa: W293

IN_FLAX = [
    PACKAGE,
    ("import torch\nimport torch.nn as nn\n", "import optax\nfrom flax import nnx\n"),
    ("(nn.Module)", "(nnx.Module)"),
    ("def __init__(self)", "def __init__(self, rngs)"),  # nnx asks where random numbers come from
    ("        super().__init__()\n", ""),
    (
        "nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3)",
        "nnx.Conv(3, 64, kernel_size=(7, 7), strides=2, padding=3, rngs=rngs)",
    ),
    ("nn.Linear(64, 1000)", "nnx.Linear(64, 1000, rngs=rngs)"),
    ("def forward(", "def __call__("),
    ("torch.flatten(x, 1)", "x.reshape(x.shape[0], -1)"),
    ("ResNetModel()", "ResNetModel(nnx.Rngs(0))"),
    (
        "torch.optim.SGD(model.parameters(), lr=0.01)",
        "nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)",
    ),
    # JAX has no tape: the forward pass is a function, of which the loss and its gradients are taken.
    ("    outputs = model(data)\n", "    def criterion(model):\n        outputs = model(data)\n"),
    (
        "    loss = nn.CrossEntropyLoss()(outputs, labels)\n",
        "        return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()\n",
    ),
    ("    loss.backward()\n", "    loss, grads = nnx.value_and_grad(criterion)(model)\n"),
    ("    optimizer.step()\n    optimizer.zero_grad()\n", "    optimizer.update(model, grads)\n"),
]

HYBRID = """
# 定义 2D Mesh: (data, model)
mesh = DeviceMesh(
    devices=[[0, 1], 
             [2, 3]],
    axis_names=["data", "model"]
)

# 输入: 按 data 轴切分
input_sharding = ShardingSpec(mesh, PartitionSpec("data", None, None, None))

# 权重: 按 model 轴切分 (模型并行)
weight_sharding = ShardingSpec(mesh, PartitionSpec(None, "model"))

@spmd(
    mesh=mesh,
    in_shardings=[input_sharding],
    parameter_shardings=weight_sharding,
    out_sharding=input_sharding  # 输出按 data 轴
)
def hybrid_parallel_step(model, data):
    # 前向: 自动处理模型并行通信 (AllGather 权重)
    output = model(data)
    
    # 反向: 自动处理梯度同步 (ReduceScatter + AllReduce)
    loss = criterion(output, labels)
    loss.backward()
    
    return loss
"""  # noqa: W291, W293

HYBRID_IN_FLAX = [
    # No tape, as above; gradients that nobody uses are nothing, so that they are applied here.
    ("    output = model(data)\n", "    def forward(model):\n        output = model(data)\n"),
    ("    loss = criterion(output, labels)\n", "        return criterion(output, labels)\n"),
    (
        "    loss.backward()\n",
        "    loss, grads = nnx.value_and_grad(forward)(model)\n"
        "    nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param).update(model, grads)\n",
    ),
]

DDP = """
model = pypto.DistributedDataParallel(
    model,
    device_ids=[0,1],
    bucket_cap_mb=25,  # 分桶大小
    overlap_allreduce=True
)
"""


@pytest.fixture
def run(tmp_path):
    """Runs a snippet as a file of its own, after the changes, and gives its names."""

    def run(text, changes=(), **known):
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path = tmp_path / "snippet.py"
        path.write_text(text)
        return runpy.run_path(str(path), init_globals=known)

    return run


@pytest.fixture
def images():
    """Of 2×2 pixels: after the published conv one is left, whose 64 features the published fc takes."""
    random = np.random.default_rng(0)
    return random.normal(size=(16, 2, 2, 3)).astype(np.float32), np.arange(16) % 10


def assert_trains_as_serial(step, make, *arguments):
    parallel, serial = make(nnx.Rngs(0)), make(nnx.Rngs(0))
    for _ in range(3):
        got, want = step(parallel, *arguments), step.__wrapped__(serial, *arguments)
        np.testing.assert_allclose(got, want, rtol=1e-5)
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (parallel, serial)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    step.verify(parallel, *arguments)


def test_gemm(run):
    gemm = run(GEMM, [PACKAGE], np=np)["gemm_spmd"]  # it does not import numpy
    names = run(GEMM_MAIN, gemm_spmd=gemm)  # nor this the function
    gemm.plan(names["A_global"], names["B_global"]).assert_counts()
    assert_spmd_equal(gemm, names["A_global"], names["B_global"])


def test_pseudo_code(run, spmd_mesh):
    x, w = np.ones((8, 16), np.float32), np.ones((16, 4), np.float32)
    spec = PartitionSpec("data", "model")
    names = run(COMPUTE, spmd=spmd, mesh=spmd_mesh, sharding_spec=spec, matmul=np.matmul, w=w)
    names["compute"].plan(x).assert_counts(all_reduce=1)
    np.testing.assert_allclose(names["compute"](x), x @ w)


def test_data_parallel_resnet(run, images):
    names = run(RESNET, IN_FLAX)
    step = names["train_step"]
    plan = step.plan(names["model"], *images)
    plan.assert_counts(all_reduce=2)  # the loss, and one bucket of gradients
    assert plan.in_layouts["labels"] == "[data]"
    assert_trains_as_serial(step, names["ResNetModel"], *images)


def test_hybrid_resnet(run, images):
    resnet = run(RESNET, IN_FLAX)
    data, labels = images

    def criterion(output, labels):
        return optax.softmax_cross_entropy_with_integer_labels(output, labels).mean()

    known = {name: resnet[name] for name in ("DeviceMesh", "ShardingSpec", "PartitionSpec", "spmd")}
    # The snippet uses labels and criterion that it does not define.
    known |= {"nnx": nnx, "optax": optax, "labels": labels, "criterion": criterion}
    step = run(HYBRID, HYBRID_IN_FLAX, **known)["hybrid_parallel_step"]
    plan = step.plan(resnet["model"], data)
    # Of the softmax over split classes the maxima and sums, the gradient of what fc takes, the loss, all
    # gradients; and the new bias of fc, whose gradient is split while it is whole.
    plan.assert_counts(all_reduce=5, all_gather=1)
    layouts = plan.in_layouts
    assert layouts["model['fc']['kernel']"] == "[-, model]"
    assert layouts["model['conv']['kernel']"] == "[-, -, -, -]"  # 2 does not divide its 7 columns
    assert layouts["data"] == "[data, -, -, -]"
    assert_trains_as_serial(step, resnet["ResNetModel"], data)


def test_distributed_data_parallel(run, images):
    resnet = run(RESNET, IN_FLAX)
    # What is made parallel is a step: gradients are reduced where it takes them, not in a model's hooks.
    step = resnet["train_step"].__wrapped__
    ddp = run(DDP, pypto=training, model=step)["model"]
    ddp.plan(resnet["model"], *images).assert_counts(all_reduce=2)
    loss, wanted = (f(resnet["ResNetModel"](nnx.Rngs(0)), *images) for f in (ddp, step))
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
