"""Writes the configs of Qwen3-30B-A3B: methods times replay times lag on v5p, and one each for other machines.

    python tools/make_configs.py [--folder FOLDER]

All come out of the one text below, as complete files, so that they cannot drift apart;
`tests/tools/test_make_configs.py` says when one did. The settings are those of SAT (arXiv 2607.18722, appendix F,
table 9) where it has them.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from sat_jax.model import PolicyConfig

CONFIGS = Path(__file__).parents[1] / "configs"
MODEL = "models/qwen3_30b_a3b"
# Name in the file's name -> preset. The paper's DPPO is the clip with the gate of its authors, at 1e-3.
METHODS = {"grpo": "grpo", "gspo": "gspo", "dppo": "dppo_clip", "sat_grpo": "sat_grpo", "sat_gspo": "sat_gspo"}
_PROMPT = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a config runs.

    Attributes:
      suffix: of the file's name.
      topology: as `sat-jax plan` names it.
      what: in words.
      row_length: T, the longest row that fits.
      rows: B.
      mesh: data, fsdp, expert, tensor.
      remat: of the policy.
      mu_dtype: of the optimizer.
    """

    suffix: str
    topology: str
    what: str
    row_length: int
    rows: int
    mesh: tuple[int, int, int, int]
    remat: str
    mu_dtype: str = "float32"


V5P = Machine(
    suffix="",
    topology="v5p:4x4x4",
    what="64 chips of TPU v5p (v5p-128)",
    row_length=32768,
    rows=64,
    mesh=(1, 8, 8, 1),
    remat="projections",
)
OTHERS = (
    Machine(
        suffix="_v5e64_row4k",
        topology="v5e:8x8",
        what="64 chips of TPU v5e",
        row_length=4096,
        rows=64,
        mesh=(1, 8, 8, 1),
        remat="full",
        mu_dtype="bfloat16",
    ),
    Machine(
        suffix="_v6e64_row24k",
        topology="v6e:8x8",
        what="64 chips of TPU v6e (Trillium)",
        row_length=24576,
        rows=64,
        mesh=(1, 8, 8, 1),
        remat="full",
    ),
    Machine(
        suffix="_h200x8_row16k",
        topology="h200:8",
        what="one node of 8 NVIDIA H200",
        row_length=16384,
        rows=8,
        mesh=(1, 2, 4, 1),
        remat="full",
    ),
)

_TEXT = """\
# Qwen3-30B-A3B-Base by {method}{with_replay}, weights {lag} steps apart, on {what}.
# Written by tools/make_configs.py: change that, or copy this. Settings of SAT (arXiv 2607.18722, appendix F) where it
# has them. Before you pay: sat-jax plan {file} --topology {topology}

name = "{name}" # the run folder is runs/<name>
seed = 0                       # every random choice of the run follows from this and from counters
steps = 544                    # optimizer steps, the paper's: four and a half passes over its 30,712 prompts
reward = "math_verify"         # verifier (extra `math`); docs/data.md has the others

[schedule]
mode = "batch_wise"            # sample a window of `lag` steps while the window before it is trained
lag = {lag}                        # n: weights are published every n steps, tokens are n to 2n - 1 steps old

[data]
task = "addition"              # not read: `path` is given
path = "data/math.arrayrecord" # DAPO-Math-17k and Dolci-RL-Zero-Math-7B, by `sat-jax prepare math` (docs/data.md)
holdout = 0                    # prompts kept out of training; the evaluation has a file of its own

[tokenizer]
kind = "file"                  # a tokenizer.json
path = "configs/{model}/tokenizer.json" # the checkpoint's: put it there, or name its folder here and in policy.path
alphabet = ""                  # for kind = "char" only

[prompt]
template = "{{prompt}}"          # the data's prompt as it is
stop = ["<|endoftext|>"]       # token strings that end a completion; see checkpoint_stop, too
chat = true                    # as a user's message, in the checkpoint's chat template
system = ""                    # no message before it
checkpoint_stop = true         # the stop tokens that the checkpoint's files name end a completion

[policy]
path = "configs/{model}" # folder of the weights; its config.json is here, which is all that `plan` reads
dtype = "bfloat16"             # compute type; parameters and optimizer are float32
remat = "{remat}"{remat_pad}# what the backward pass computes again: full = every layer; attention = all but
                               # attention; projections = nor its four projections; none = nothing

[sampling]
temperature = 1.0              # the trainer divides its logits by the same value
max_new_tokens = {max_new}         # of a completion; with the prompt it fills a row

[batch]
groups_per_step = 256          # P: prompts of one optimizer step
minibatches = 1                # k: optimizer steps of a batch
group_size = 16                # M: completions of one prompt
row_length = {row_length}             # T: a packed row, tokens; prompts of up to {prompt} tokens{limit}
rows = {rows}                      # B: rows of one microbatch
buckets = []                   # shorter rows that a microbatch may take; each compiles programs

[objective]
preset = "{preset}"{preset_pad}# the method
eps_low = 0.2                  # the paper's clip, for every method
eps_high = 0.2                 # likewise
kl_coef = 1e-3                 # k3 term against the frozen first weights, by a forward pass more
replay = {replay}{replay_pad}# train on the experts that the sampler chose (R3)

[optim]
peak_lr = 1e-6                 # constant
warmup = 0                     # steps
beta1 = 0.9                    # decay of the mean of gradients (AdamW)
beta2 = 0.98                   # decay of the mean of their squares
eps = 1e-8                     # added to the root of that mean
weight_decay = 0.0             # decoupled
clip_norm = 1.0                # global gradient norm
mu_dtype = "{mu_dtype}"{mu_pad}# how the mean of gradients is stored
moments_memory = "device"      # where both means are kept: "host" = the host's memory

[warm_start]
steps = 0                      # none: the run begins at policy.path
batch_size = 256               # not read
peak_lr = 1e-5                 # not read
noise = 0.0                    # not read
path = ""                      # not read

[rollout]
engine = "remote"              # bridges beside SGLang servers (docs/sglang.md)
endpoints = ["dns:rollout:30001"] # every address of this name
listen = "127.0.0.1:0"         # of the local engine: not used
dtype = "bfloat16"             # of the sampler, and of the tensors of a push
slots = 256                    # of the local engine: not used
deadline = 3600.0              # seconds without any completion after which the run stops
probe_tolerance = 0.1          # a version serves only if its log-probs of the probe agree to this, nats
chunk_bytes = 4194304          # of a push
tls_ca = "certs/ca.pem"        # authority that signed the bridges' certificates
token_file = ""                # bearer token; empty = none
function = ""                  # one completion a prompt, no trajectory by code
trajectories = 64              # not read

[verifier]
workers = 16                   # processes
seconds = 10.0                 # of one attempt, after which its process is killed
memory_mb = 4096               # address space of a process, MiB
on_timeout = "mask"            # the completion is left out of its group and of the loss
on_error = "mask"              # likewise
overlong_cache = 0             # no punishment of long completions
overlong_factor = 1.0          # not read

[checkpoint]
every = 40                     # steps; rounded up to the edge of a window
keep = 2                       # newest checkpoints that stay
keep_best = 1                  # beside them, by the training reward
path = ""                      # all hosts must see it: a shared folder, or "gs://bucket/..."; empty = in the run folder
atomic_rename = true           # false where folders cannot be renamed in one step, on a mounted bucket, say

[eval]
every = 40                     # steps
prompts = 30                   # problems of `path`
path = "data/aime24.jsonl"     # by `sat-jax prepare math`
samples = 16                   # k of avg@k

[alarms]                       # of the paper's stack: healthy 0.006 to 0.011, trouble above these
mismatch_abs_mean = 0.03       # mean |log pi - log mu|, nats
mismatch_k3 = 0.0028           # k3 estimate of the divergence, nats
mismatch_mult_prob_error = 1.05 # mean of exp |log pi - log mu|

[mesh]                         # devices along each axis; their product is the number of devices
data = {data}                       # copies of the model
fsdp = {fsdp}                       # shards of every parameter's width
expert = {expert}                     # shards of the experts
tensor = {tensor}                     # shards of the heads and of the experts' hidden width

[watchdog]
seconds = 7200.0               # of one computation or save: then the run writes its stacks; later it ends
"""


def files() -> Iterator[tuple[str, str]]:
    """Every file: its path below `configs/`, and its text."""
    policy = PolicyConfig.qwen3_30b_a3b()
    yield f"{MODEL}/config.json", json.dumps(policy.to_hf(), indent=2) + "\n"
    for method in METHODS:
        for replay in (False, True):
            for lag in (1, 8):
                yield _config(method, lag, V5P, replay=replay)
    for machine in OTHERS:
        yield _config("sat_gspo", 8, machine, replay=True)


def topologies() -> dict[str, str]:
    """The machine of each config, by its file's name, as `sat-jax plan` names it."""
    suffixes = {machine.suffix: machine.topology for machine in OTHERS}
    names = [path for path, _ in files() if path.endswith(".toml")]
    return {
        name: next((topology for suffix, topology in suffixes.items() if suffix in name), V5P.topology)
        for name in names
    }


def _config(method: str, lag: int, machine: Machine, *, replay: bool) -> tuple[str, str]:
    name = f"qwen3_30b_a3b_{method}{'_r3' if replay else ''}_lag{lag}{machine.suffix}"
    data, fsdp, expert, tensor = machine.mesh
    short = machine.row_length < V5P.row_length

    def pad(value: str, key: int) -> str:
        """Spaces up to the column of the comments."""
        return " " * max(1, 31 - key - len(value))

    shown = "true" if replay else "false"
    text = _TEXT.format(
        name=name,
        file=f"configs/{name}.toml",
        method=method.replace("_", "-").upper(),
        with_replay=" with replayed routes (R3)" if replay else "",
        lag=lag,
        what=machine.what,
        topology=machine.topology,
        model=MODEL,
        remat=machine.remat,
        remat_pad=pad(machine.remat, len('remat = ""')),
        max_new=machine.row_length - _PROMPT,
        row_length=machine.row_length,
        prompt=_PROMPT,
        limit="; the longest row that fits these chips" if short else "; the checkpoint's limit",
        rows=machine.rows,
        preset=METHODS[method],
        preset_pad=pad(METHODS[method], len('preset = ""')),
        replay=shown,
        replay_pad=pad(shown, len("replay = ")),
        mu_dtype=machine.mu_dtype,
        mu_pad=pad(machine.mu_dtype, len('mu_dtype = ""')),
        data=data,
        fsdp=fsdp,
        expert=expert,
        tensor=tensor,
    )
    return f"{name}.toml", text


def main(folder: Path = CONFIGS) -> None:
    """Writes all files into the folder."""
    for path, text in files():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        print(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes the configs of Qwen3-30B-A3B.")
    parser.add_argument("--folder", type=Path, default=CONFIGS, help="where to (default: configs)")
    main(parser.parse_args().folder)
