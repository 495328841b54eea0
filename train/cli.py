"""`sat-jax`: the verbs. Parses, calls, and says in one line what went wrong."""

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from train.cli_bench import add_benches, xla_flags

if TYPE_CHECKING:
    from train.multihost import Launch

RUNS = Path("runs")
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 1 an error that was said, 75 preempted, 130 interrupted."""
    try:
        signal.signal(signal.SIGINT, _interrupted)
        return _run(argv)
    except KeyboardInterrupt:
        _say("interrupted; the same command resumes from the newest checkpoint")
        return INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    # gRPC takes a third of a second to import: within `main`, an interruption meanwhile is said in one line, too.
    from rollout_bridge.errors import BridgeError
    from train.host_threads import host_threads

    os.environ |= host_threads(os.environ)
    arguments = _parser().parse_args(argv)
    # A user's module:function lies in the present folder, where a console script does not look by itself.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        arguments.run(arguments)
    except (ValueError, OSError, BridgeError) as error:
        # One clear line; the traceback of an error that we foresaw helps nobody.
        # Nor does what JAX notes about a traceback that is not shown.
        notes = [note for note in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in note]
        _say(f"error: {error}", *notes)
        return 1
    return 0


def _interrupted(_signal: int, _frame: FrameType | None) -> None:
    """The first Ctrl-C closes the run in order, the next one ends it: its cuts are whole at any moment."""
    signal.signal(signal.SIGINT, _interrupted_again)
    raise KeyboardInterrupt


def _interrupted_again(_signal: int, _frame: FrameType | None) -> NoReturn:
    _say("interrupted again; ended without closing, the same command resumes from the newest checkpoint")
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sat-jax", description="Asynchronous RL for mixture-of-experts policies.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    train = verbs.add_parser("train", help="run a config, or resume its run")
    _config_arguments(train)
    train.add_argument("--fresh", action="store_true", help="set a run of this name aside and begin anew")
    train.add_argument("--quiet", action="store_true", help="no console display; the files are written all the same")
    train.add_argument("--record", action="store_true", help="save every step's batch, for tools/replay_batch.py")
    train.add_argument(
        "--allow-changed",
        action="append",
        default=[],
        metavar="KEY",
        help="resume although this key of the config (or a whole section) was changed; repeatable",
    )
    train.add_argument("--profile", metavar="FIRST:LAST", help="write an xprof trace of these steps, such as 10:12")
    _multihost_arguments(train)
    train.set_defaults(run=_train)
    serve = verbs.add_parser("serve", help="serve a config's policy with the local engine, for a trainer elsewhere")
    _config_arguments(serve)
    serve.add_argument("--listen", metavar="HOST:PORT", help="in place of rollout.listen")
    serve.set_defaults(run=_serve)
    evaluate = verbs.add_parser("eval", help="accuracy of a run's newest checkpoint, or of what a fleet serves")
    evaluate.add_argument("target", type=Path, help="run folder, or the config of a remote fleet")
    evaluate.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="A.B=C", help="such as eval.samples=16"
    )
    evaluate.add_argument("--compare", type=Path, metavar="FILE", help="an earlier --json: the paired difference")
    evaluate.add_argument("--json", action="store_true", help="one JSON object on standard output")
    evaluate.set_defaults(run=_evaluate)
    report = verbs.add_parser("report", help="write a run's report.html anew")
    report.add_argument("folder", type=Path, help="run folder")
    report.set_defaults(run=_report)
    _convert_arguments(verbs.add_parser("convert", help="weights to a Hugging Face folder, from one or from a run"))
    doctor = verbs.add_parser("doctor", help="what is wrong with a run, before its first step costs anything")
    _config_arguments(doctor)
    doctor.add_argument("--json", action="store_true", help="one JSON object on standard output")
    doctor.set_defaults(run=_doctor)
    _plan_arguments(
        verbs.add_parser("plan", help="what a config needs on a machine that is not there, before it is paid")
    )
    _prepare_arguments(verbs.add_parser("prepare", help="public data sets -> a file of prompts and answers"))
    add_benches(verbs.add_parser("bench", help="time a part on this machine"))
    return parser


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    _config_arguments(parser)
    parser.add_argument("--topology", required=True, metavar="NAME", help="v5p:4x4x4, v5e:8x8, v6e:8x8, h200:8, cpu:8")
    parser.add_argument(
        "--network", type=float, default=12.5, metavar="GB/S", help="between trainer and fleet, for a push (12.5)"
    )
    parser.add_argument("--rollout-tokens-per-s", type=float, metavar="R", help="that the whole fleet samples")
    parser.add_argument(
        "--response-tokens", type=int, metavar="N", help="mean of a completion (default: a quarter of the longest)"
    )
    parser.add_argument("--largest", action="store_true", help="compile for the largest microbatch that fits, too")
    parser.add_argument(
        "--no-cache", action="store_true", help="compile anew; else figures are kept in RUNS/plan-cache"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=_plan)


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="Hugging Face folder, or run folder")
    parser.add_argument("target", type=Path, help="new Hugging Face folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the tensors (default: as stored)")
    parser.add_argument(
        "--layout",
        choices=("per-expert", "fused"),
        default="per-expert",
        help="of the experts: a tensor each (default, what engines read), or all of a layer in two",
    )
    parser.add_argument("--version", type=int, metavar="N", help="of a run's checkpoint (default: the newest)")
    parser.set_defaults(run=_convert)


def _prepare_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    problems = kinds.add_parser("math", help="problems with answers: DAPO-Math-17k, Dolci-RL-Zero-Math, AIME and alike")
    problems.add_argument("sources", nargs="+", type=Path, metavar="SRC", help=".jsonl, .parquet or .arrayrecord")
    problems.add_argument("--out", type=Path, required=True, metavar="FILE", help=".jsonl or .arrayrecord")
    problems.add_argument(
        "--instruction",
        choices=("keep", "none", "boxed", "answer"),
        default="keep",
        help="keep the source's, none, ask for a box, or DAPO's Answer: line (default: keep)",
    )
    problems.add_argument("--tokenizer", type=Path, metavar="PATH", help="folder of a checkpoint, or a tokenizer.json")
    problems.add_argument("--chat", action="store_true", help="put prompts into the checkpoint's chat template")
    problems.add_argument("--max-prompt-tokens", type=int, default=0, metavar="N", help="leave longer prompts out")
    problems.add_argument(
        "--exclude", type=Path, nargs="+", default=[], metavar="FILE", help="leave their questions out"
    )
    problems.add_argument("--check", default="", metavar="VERIFIER", help="leave out what it does not accept as gold")
    problems.add_argument("--skip-bad", action="store_true", help="count records that cannot be used, do not stop")
    problems.add_argument("--seed", type=int, help="shuffle (default: the order of the sources)")
    problems.add_argument("--limit", type=int, default=0, metavar="N", help="at most so many problems")
    problems.add_argument("--supervised", action="store_true", help="keep worked solutions, for warm_start.path")
    problems.add_argument("--json", action="store_true", help="one JSON object on standard output")
    problems.set_defaults(run=_prepare_math)
    tasks = kinds.add_parser("reasoning-gym", help="procedural tasks with verifiers, without a download")
    tasks.add_argument("task", help="name of a task, e.g. chain_sum")
    tasks.add_argument("--out", type=Path, required=True, metavar="FILE", help=".jsonl or .arrayrecord")
    tasks.add_argument("--size", type=int, default=10_000, metavar="N", help="problems (default: 10000)")
    tasks.add_argument("--seed", type=int, default=0)
    tasks.add_argument("--with", dest="settings", default="{}", metavar="JSON", help="settings of the task")
    tasks.set_defaults(run=_prepare_reasoning)


def _multihost_arguments(parser: argparse.ArgumentParser) -> None:
    several = parser.add_argument_group(
        "several processes", "by default as the cluster's environment says; docs/multihost.md"
    )
    several.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, which opens the port")
    several.add_argument("--processes", type=int, metavar="N", help="how many processes the run has")
    several.add_argument("--process", type=int, metavar="I", help="which this is, from 0")
    several.add_argument("--distributed", action="store_true", help="have JAX detect the cluster")


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="TOML file")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="A.B=C", help="override a key; repeatable"
    )
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="DIR", help="where run folders are (default: runs)")


def _train(arguments: argparse.Namespace) -> None:
    # Imported here, so that `--help` and a misspelt key do not wait for JAX's programs.
    from train.claim import claim_together, set_aside
    from train.config import load
    from train.loop import train
    from train.multihost import join
    from train.preemption import Preempted, Preemption
    from train.profiling import ProfileConfig
    from train.run import Options

    profile = None if arguments.profile is None else ProfileConfig.parse(arguments.profile)
    preemption = Preemption()
    preemption.install()
    config = load(arguments.config, arguments.overrides)
    if profile is not None:
        profile.check(config.steps)
    folder = arguments.runs / config.name
    try:
        with join(_launch(arguments), preemption) as team:
            first = team.share.process == 0
            if arguments.fresh and first and (aside := set_aside(folder)) is not None:
                _say(f"the run that was in {folder} is now in {aside}")
            options = Options(
                console=not arguments.quiet,
                record=arguments.record,
                preemption=preemption,
                profile=profile,
                team=team,
            )
            with claim_together(team, folder, config, arguments.allow_changed):
                train(config, folder, options)
    except Preempted:
        _say("preempted; the same command resumes from the newest checkpoint")
        raise
    if first:
        _say(f"done: {folder / 'report.html'} explains the run")


def _launch(arguments: argparse.Namespace) -> "Launch | None":
    from train.multihost import Launch, launch_of

    flags = (arguments.coordinator, arguments.processes, arguments.process)
    if flags == (None, None, None) and not arguments.distributed:
        return launch_of(os.environ)
    return Launch(coordinator=flags[0], processes=flags[1], process=flags[2])


def _serve(arguments: argparse.Namespace) -> None:
    from train.config import load
    from train.engines import serve_local

    config = load(arguments.config, arguments.overrides)
    serve_local(config, arguments.listen or config.rollout.listen)


def _evaluate(arguments: argparse.Namespace) -> None:
    from train.evaluate_run import evaluate_run

    evaluate_run(arguments.target, arguments.overrides, arguments.compare, as_json=arguments.json)


def _report(arguments: argparse.Namespace) -> None:
    from train.report import regenerate

    _say(f"written: {regenerate(arguments.folder)}")


def _convert(arguments: argparse.Namespace) -> None:
    from train.convert import Options, convert

    options = Options(dtype=arguments.dtype, layout=arguments.layout, version=arguments.version)
    _say(f"written: {convert(arguments.source, arguments.target, options)}")


def _doctor(arguments: argparse.Namespace) -> None:
    from train.config import load
    from train.doctor.examine import doctor

    config = load(arguments.config, arguments.overrides)
    if not doctor(config, arguments.runs / config.name, as_json=arguments.json):
        raise SystemExit(1)


def _plan(arguments: argparse.Namespace) -> None:
    kind, _, count = arguments.topology.partition(":")
    # Read when JAX or libtpu first start: nothing here computes, no metadata server answers, and several plans may run.
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    # The last two are of any machine: without them libtpu says at length that it found out neither.
    quiet = {"TPU_MIN_LOG_LEVEL": "3", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}
    os.environ |= {name: os.environ.get(name, value) for name, value in quiet.items()}
    if kind == "cpu" and count.isdecimal():
        os.environ["XLA_FLAGS"] = xla_flags(0, int(count))
    from train.config import load
    from train.plan import PlanOptions, make_plan
    from train.plan.report import as_json, as_text

    options = PlanOptions(
        topology=arguments.topology,
        cache=None if arguments.no_cache else arguments.runs / "plan-cache",
        network=arguments.network * 1e9,
        rollout_tokens=arguments.rollout_tokens_per_s,
        response_tokens=arguments.response_tokens,
        largest=arguments.largest,
    )
    plan = make_plan(load(arguments.config, arguments.overrides), options, _say)
    sys.stdout.write((as_json(plan) if arguments.json else as_text(plan)) + "\n")
    if not plan.fits:
        raise SystemExit(1)


def _prepare_math(arguments: argparse.Namespace) -> None:
    from train.prepare.math import MathOptions, prepare_math
    from train.prepare.report import report_counts

    fields = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(MathOptions)}
    options = MathOptions(**{**fields, "sources": tuple(arguments.sources), "exclude": tuple(arguments.exclude)})
    report_counts(prepare_math(options), options.out, as_json=arguments.json)


def _prepare_reasoning(arguments: argparse.Namespace) -> None:
    from train.prepare.reasoning import parse_settings, prepare_reasoning

    settings = parse_settings(arguments.settings)
    count = prepare_reasoning(arguments.task, arguments.size, arguments.seed, settings, arguments.out)
    _say(f'written: {count} problems in {arguments.out}; train with reward = "reasoning_gym"')


def _say(*lines: str) -> None:
    sys.stderr.write("".join(f"sat-jax: {line}\n" for line in lines))


if __name__ == "__main__":
    raise SystemExit(main())
