"""Every example in every layout: the losses are the serial function's, the plan is the textbook's.

The counts are those of a step on `data=4,model=2`, where all layouts but `2d` use both axes for one purpose.
Sources: ZeRO (Rajbhandari et al. 2020), Megatron-LM (Shoeybi et al. 2019), GShard (Lepikhin et al. 2020).
"""

import json
import re

import pytest

KINDS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllToAll": "all_to_all",
    "CollectivePermute": "collective_permute",
}

SCALARS = 1  # the loss; with it travel what else is summed to a scalar, and the norm to clip by
BUCKET = 1  # all gradients of one kind together


def zero(large: int, again: int = 0, norms: int = 0) -> dict[str, dict[str, int]]:
    """ZeRO-1 and FSDP of so many large parameters, of which some are gathered again to recompute.

    `norms` is how many AllReduces batch norms need.
    """
    scattered = {"reduce_scatter": large, "all_reduce": norms + SCALARS + BUCKET}
    return {
        "zero1": {"all_gather": large, **scattered},
        "fsdp": {"all_gather": large + again, **scattered},
    }


# The classifier: three matrices; `zero1` and `fsdp` split the biases too, but that of ten classes.
MLP = {
    "dp": {"all_reduce": SCALARS + BUCKET},
    **zero(5),
    "tp": {"all_reduce": 1},  # one pair of layers, whose input needs no gradient
    "2d": {"all_reduce": 1 + SCALARS + BUCKET},
}

LOOKUP, MAXIMA_AND_SUMS, PAIRS = 1, 2, 2  # of the vocabulary; of the cross-entropy; of a layer
LAST = 1  # the gradient of what the head reads
# The gradient of what the first layer reads stays partial: only the embeddings want it, and reduce what they
# make of it, the tokens' by a ReduceScatter, the positions' and the first norm's with each other.
FIRST, TOKENS, FIRST_BUCKET = -1, 1, 1

# The GPT: its layers are one loop, whose collectives count once. The loop carries the gradient of what a
# layer reads as a partial sum, so that the head's needs no AllReduce of its own.
RECOMPUTED = (
    1  # of a layer's two forward AllReduces, only what the second one makes is not read again
)
VOCABULARY_SPLIT = LOOKUP + MAXIMA_AND_SUMS + FIRST_BUCKET
GPT_TENSOR = PAIRS + RECOMPUTED + PAIRS + VOCABULARY_SPLIT
GPT = {
    "dp": {"all_reduce": SCALARS + BUCKET},
    **zero(10, again=7),
    "tp": {"all_reduce": GPT_TENSOR + SCALARS, "reduce_scatter": TOKENS},
    # The norm's part of split parameters is summed over `model`, which the loss is whole on.
    "2d": {"all_reduce": GPT_TENSOR + SCALARS + 1 + BUCKET, "reduce_scatter": TOKENS},
}

# The mixture of experts: two layers, written out.
LAYERS = 2
MOE_TENSOR = 2 * PAIRS * LAYERS + FIRST + LAST + VOCABULARY_SPLIT
THERE_AND_BACK = 2 * 2 * LAYERS
MOE = {
    "dp": {"all_reduce": SCALARS + BUCKET},
    **zero(15),
    "tp": {"all_reduce": MOE_TENSOR + SCALARS, "reduce_scatter": TOKENS},
    "ep": {"all_to_all": THERE_AND_BACK, "all_reduce": SCALARS + BUCKET},
    # What all have alike is summed over both axes, the experts over `data`; their norm over `model`.
    "2d": {"all_to_all": THERE_AND_BACK, "all_reduce": SCALARS + 1 + 2 * BUCKET},
}

# The ResNet: seven batch norms over a split batch, each with statistics and their gradients to sum, with
# which gradients travel that are ready. Three blocks, whose features are split inside.
NORMS, BLOCKS, STEM_NORM = 7 + 7, 3, 1
RESNET = {
    "dp": {"all_reduce": NORMS + SCALARS + BUCKET},
    **zero(7, norms=NORMS),
    # Of what the first block reads, the stem's norm wants only sums of the gradient, and the stem the rest.
    "tp": {"all_reduce": 2 * BLOCKS + FIRST + STEM_NORM + FIRST_BUCKET},
    # These sums are of the data as well: one AllReduce over both axes.
    "2d": {"all_reduce": 2 * BLOCKS + FIRST + NORMS + SCALARS + BUCKET + FIRST_BUCKET},
}

# The vision transformer: three layers; no vocabulary.
VIT_TENSOR = 2 * PAIRS * 3 + FIRST + FIRST_BUCKET
VIT = {
    "dp": {"all_reduce": SCALARS + BUCKET},
    **zero(20),
    "tp": {"all_reduce": VIT_TENSOR + SCALARS},
    "2d": {"all_reduce": VIT_TENSOR + SCALARS + 1 + BUCKET},
}

EXAMPLES = {
    "train_mlp.py": MLP,
    "train_gpt.py": GPT,
    "train_moe.py": MOE,
    "train_resnet.py": RESNET,
    "train_vit.py": VIT,
}
CASES = [(script, layout) for script, layouts in EXAMPLES.items() for layout in layouts]


def trained(run, script, layout, mesh, steps, folder):
    """The losses, their largest difference from the serial ones, and the counts of the plan."""
    file = folder / "losses.json"
    options = ("--layout", layout, "--mesh", mesh, "--steps", str(steps), "--losses", file)
    output = run(script, *options, "--check", str(steps))
    (apart,) = re.findall(rf"of {steps} losses from the serial ones: (\S+)\n", output)
    (summary,) = re.findall(r"^train_step: (.*?);", output, re.MULTILINE)
    counts = {KINDS[kind]: int(count) for count, kind in re.findall(r"(\d+) (\w+)", summary)}
    return json.loads(file.read_text()), float(apart), counts


@pytest.mark.parametrize("script", EXAMPLES)
def test_an_example(run, script, tmp_path):
    losses, apart, counts = trained(run, script, "2d", "data=4,model=2", 2, tmp_path)
    assert list(losses) == ["1", "2"]
    assert apart < 1e-5
    assert counts == EXAMPLES[script]["2d"]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "layout"), CASES)
def test_every_layout(run, script, layout, tmp_path):
    _, apart, counts = trained(run, script, layout, "data=4,model=2", 20, tmp_path)
    assert apart < 1e-4
    assert counts == EXAMPLES[script][layout]


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES)
def test_one_device(run, script, tmp_path):
    _, apart, counts = trained(run, script, "fsdp", "data=1", 20, tmp_path)
    assert apart < 1e-4
    assert counts == {}


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES)
def test_losses_go_on_after_a_checkpoint_on_another_mesh_in_another_layout(run, script, tmp_path):
    folder, whole, rest = tmp_path / "run", tmp_path / "whole.json", tmp_path / "rest.json"
    none = ("--check", "0")
    run(script, "--steps", "8", "--layout", "2d", "--losses", whole, *none)
    run(script, "--steps", "5", "--layout", "2d", "--save", folder, *none)
    there = ("--layout", "fsdp", "--mesh", "data=2", "--save", folder, "--resume")
    output = run(script, "--steps", "8", *there, "--losses", rest, *none)
    assert "resumed after step 5\n" in output
    losses, others = json.loads(rest.read_text()), json.loads(whole.read_text())
    assert list(losses) == ["6", "7", "8"]
    assert losses == pytest.approx({step: others[step] for step in losses}, rel=1e-4)
