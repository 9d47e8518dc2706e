"""The command ``actds plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from actds.schema.v0_1 import DType
    from actds_writers.sizing.machine import Machine
    from actds_writers.sizing.needs import Burst, Geometry, Load, Overhead

DTYPES = ("bfloat16", "float16", "float32")
DEFAULT_TOKENS_PER_REQUEST = 512.0
DEFAULT_TOKENS_PER_STEP = 512.0
RATE = click.FloatRange(min=0, min_open=True)


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="Model folder with config.json.")
@click.option("--d-model", type=click.IntRange(min=1), help="Channels, without a model folder.")
@click.option("--layers", type=click.IntRange(min=1), help="Layers, without a model folder.")
@click.option(
    "--hooks", default="resid_post:all", show_default=True, help="Hooks, as of actds write."
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Type of the stored rows. Default: the model's, else bfloat16.",
)
@click.option(
    "--readouts",
    type=click.IntRange(min=0),
    default=9,
    show_default=True,
    help="Numbers per row and hook beside the row; 0 for none.",
)
@click.option("--prefill-rate", type=click.FloatRange(min=0), help="Prompt tokens per second.")
@click.option("--decode-rate", type=click.FloatRange(min=0), help="Generated tokens per second.")
@click.option(
    "--burst",
    multiple=True,
    metavar="FACTOR:SECONDS",
    help="A load of FACTOR times the mean for SECONDS; may be repeated.",
)
@click.option(
    "--profile", metavar="DATASET", help="Take rates, bursts and bytes from an earlier harvest."
)
@click.option("--tokens-per-request", type=RATE, help="Computed tokens per request. Default: 512.")
@click.option("--tokens-per-step", type=RATE, help="Tokens per step. Default: 512.")
@click.option(
    "--tokens", default=1_000_000_000, show_default=True, help="Tokens that are to be stored."
)
@click.option(
    "--stall",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="Seconds that the disk may stand still without a loss.",
)
@click.option(
    "--max-step-rows",
    type=click.IntRange(min=1),
    default=8192,
    show_default=True,
    help="Tokens of the largest step: vLLM's max_num_batched_tokens.",
)
@click.option("--rows-per-shard", type=click.IntRange(min=1), help="Default: as of actds write.")
@click.option(
    "--ring-mib", type=click.IntRange(min=1), help="Judge this ring instead of proposing one."
)
@click.option(
    "--staging-mib",
    type=click.IntRange(min=0),
    default=64,
    show_default=True,
    help="Staging ring on the device; one step at least.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads that encode.")
@click.option("--d2h-gbps", type=RATE, help="Rate from the device to the host, GB/s.")
@click.option("--copy-gbps", type=RATE, help="Rate of a memory copy, GB/s.")
@click.option("--encode-gbps", type=RATE, help="Rate of one encoding thread, GB/s.")
@click.option("--disk-gbps", type=RATE, help="Rate of hashed, synced writes, GB/s.")
@click.option(
    "--measure",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Measure the rates that are not given, here and on FOLDER's disk; takes seconds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON (actds.plan/1).")
def plan(
    model: Path | None,
    d_model: int | None,
    layers: int | None,
    hooks: str,
    dtype: DType | None,
    readouts: int,
    prefill_rate: float | None,
    decode_rate: float | None,
    burst: tuple[str, ...],
    profile: str | None,
    tokens_per_request: float | None,
    tokens_per_step: float | None,
    tokens: int,
    stall: float,
    max_step_rows: int,
    rows_per_shard: int | None,
    ring_mib: int | None,
    staging_mib: int,
    threads: int | None,
    d2h_gbps: float | None,
    copy_gbps: float | None,
    encode_gbps: float | None,
    disk_gbps: float | None,
    measure: Path | None,
    as_json: bool,
) -> None:
    """Size a harvest: bytes per second at every stage, disk, rings, memory.

    Says which stage saturates first and what a stall of the disk costs under each overflow
    policy. Sizes for the burst, not for the mean. Exits with 1 when a stage cannot carry the
    mean load.
    """
    from actds_writers.harvest.processes import LANE_NBYTES
    from actds_writers.sizing import needs as sizing
    from actds_writers.sizing import page as plan_page
    from actds_writers.sizing.capacity import MIB, capacity

    geometry = _geometry(model, d_model, layers, hooks, dtype, readouts)
    load, overhead = _load(
        profile,
        {"prefill": prefill_rate, "decode": decode_rate},
        burst,
        {"tokens_per_request": tokens_per_request, "tokens_per_step": tokens_per_step},
    )
    rates = {"d2h": d2h_gbps, "copy": copy_gbps, "encode": encode_gbps, "disk": disk_gbps}
    rows = rows_per_shard or sizing.rows_per_shard(geometry.row_nbytes)
    sizes = sizing.Sizes(
        max_step_rows=max_step_rows,
        rows_per_shard=rows,
        ring_nbytes=(ring_mib or 0) * MIB,
        staging_nbytes=staging_mib * MIB,
        lane_nbytes=LANE_NBYTES,
    )
    machine = _machine(rates, measure, threads)
    found = capacity(
        geometry,
        sizes,
        load,
        machine,
        overhead,
        stall_s=stall,
    )
    command = plan_page.write_options(found, hooks, None if model is None else str(model))
    if as_json:
        facts = plan_page.as_json(found, machine, overhead, tokens, command)
        click.echo(json.dumps(facts, indent=2, sort_keys=True))
    else:
        click.echo("\n".join(plan_page.page(found, machine, overhead, tokens, command)))
    if not found.fits:
        click.get_current_context().exit(1)


def _geometry(
    model: Path | None,
    d_model: int | None,
    layers: int | None,
    hooks: str,
    dtype: DType | None,
    readouts: int,
) -> Geometry:
    """Return what a token is, from a model folder or from numbers.

    Raises:
        ActdsError: E005 no model, E007 unknown hook, E009 neither folder nor numbers.
    """
    from actds.errors import ActdsError
    from actds_writers.capture.hooks import hook_specs, parse_hooks
    from actds_writers.config import model_config
    from actds_writers.sizing.needs import Geometry

    config: dict[str, Any] = {"hidden_size": d_model, "num_hidden_layers": layers}
    computed: DType = "bfloat16"
    if model is not None:
        config = {**model_config(model), **{k: v for k, v in config.items() if v is not None}}
        own = config.get("dtype") or config.get("torch_dtype")
        computed = own if own in DTYPES else computed
    if None in (config["hidden_size"], config["num_hidden_layers"]):
        raise ActdsError(
            "E009",
            "--model",
            got="no model folder, and no --d-model with --layers",
            expected="one or the other",
        )
    places = parse_hooks(hooks, config["num_hidden_layers"])
    return Geometry.of(hook_specs(places, config, computed, dtype), readouts)


def _load(
    profile: str | None,
    rates: dict[str, float | None],
    bursts: tuple[str, ...],
    means: dict[str, float | None],
) -> tuple[Load, Overhead]:
    """Return load and bytes: given before measured before assumed.

    Raises:
        ActdsError: E009 when no rate is known; as ``read_profile``.
    """
    from actds.errors import ActdsError
    from actds.store import open_store
    from actds_writers.sizing.load_profile import read_profile
    from actds_writers.sizing.needs import MEASURED, Load

    given = tuple(_burst(text) for text in bursts)
    known = {name: value for name, value in {**rates, **means}.items() if value is not None}
    if profile is not None:
        found = read_profile(open_store(profile))
        for windows in found.windows:
            click.echo(
                f"profile: windows of {windows.seconds:g} s: mean {windows.mean:,.0f}, "
                f"p50 {windows.p50:,.0f}, p99 {windows.p99:,.0f}, max {windows.max:,.0f} tokens/s "
                f"({windows.n} windows{', too few for a p99' if found.is_short else ''})",
                err=True,
            )
        load = found.load
        facts = {name: getattr(load, name) for name in ("prefill", "decode", *means)}
        return Load(**{**facts, **known}, bursts=given or load.bursts), found.overhead
    if not sum(value or 0.0 for value in rates.values()):
        raise ActdsError(
            "E009",
            "--prefill-rate, --decode-rate",
            got="no rate",
            expected="tokens per second, or --profile DATASET",
        )
    assumed = {
        "prefill": 0.0,
        "decode": 0.0,
        "tokens_per_request": DEFAULT_TOKENS_PER_REQUEST,
        "tokens_per_step": DEFAULT_TOKENS_PER_STEP,
    }
    return Load(**{**assumed, **known}, bursts=given), MEASURED


def _burst(text: str) -> Burst:
    from actds.errors import ActdsError
    from actds_writers.sizing.needs import Burst

    try:
        factor, seconds = (float(part) for part in text.split(":"))
    except ValueError:
        factor = seconds = 0.0
    if not (1.0 <= factor < 1e6 and 0.0 < seconds < 1e9):
        raise ActdsError(
            "E009",
            "--burst",
            got=ascii(text)[:80],
            expected="FACTOR:SECONDS with a factor of at least 1, for example 4:10",
        )
    return Burst(factor, seconds)


def _machine(rates: dict[str, float | None], folder: Path | None, threads: int | None) -> Machine:
    from actds_writers.sizing import machine

    measured: dict[str, float] = {}
    if folder is not None:
        measured = machine.measure(folder)
        words = ", ".join(f"{name} {gbps:.2f}" for name, gbps in sorted(measured.items()))
        click.echo(f"measured: {words} GB/s", err=True)
    return machine.machine(rates, measured, threads or machine.usual_threads())
