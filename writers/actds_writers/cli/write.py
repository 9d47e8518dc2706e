"""The command ``actds write``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from actds_writers.capture.policies import POLICIES

if TYPE_CHECKING:
    from actds_writers.config import WriteOptions


@click.command()
@click.argument("out", metavar="OUT")
@click.option(
    "--model",
    required=True,
    type=click.Path(path_type=Path),
    help="Model folder: config.json, weights, tokenizer.",
)
@click.option(
    "--prompts",
    required=True,
    help="JSONL, JSON, Parquet or text file, or hf:FOLDER. Records hold prompt, text or messages.",
)
@click.option(
    "--writer",
    default="vllm",
    show_default=True,
    help="Engine that runs the model: vllm, transformers for models that vLLM cannot run, or one "
    "that another package registers.",
)
@click.option(
    "--canary",
    metavar="SHARE",
    help="Replay so many requests alone after the harvest and compare: 0.1%, or a number.",
)
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Hold the hooks' rows of two short prompts against the model's own before the first row.",
)
@click.option(
    "--hooks",
    required=True,
    help="Places to capture: resid_post:10,20, resid_post:0-29, resid_post:all.",
)
@click.option(
    "--max-tokens", default=128, show_default=True, help="Generated tokens per request at most."
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Sampling temperature.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the engine and the row order.")
@click.option(
    "--engine",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of the engine; for vllm an argument of its EngineArgs.",
)
@click.option("--resume", is_flag=True, help="Go on with OUT without redoing finished requests.")
@click.option(
    "--skip-broken", is_flag=True, help="Record broken prompt records and go on without them."
)
@click.option(
    "--store-dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Store rows in another type than the model computes in; recorded as a cast.",
)
@click.option(
    "--order",
    type=click.Choice(["permuted", "sequence"]),
    default="permuted",
    show_default=True,
    help="Row order inside a shard.",
)
@click.option(
    "--rows-per-shard", type=click.IntRange(min=1), help="Default: 65536, fewer if memory is short."
)
@click.option(
    "--overflow",
    type=click.Choice(list(POLICIES)),
    default="block",
    show_default=True,
    help="When the ring is full: "
    + "; ".join(f"{policy.name}, {policy.summary}" for policy in POLICIES.values())
    + ".",
)
@click.option(
    "--ring-mib",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Shared memory between engine and writer; two steps at least.",
)
@click.option(
    "--raw-mib",
    type=click.IntRange(min=0),
    default=64,
    show_default=True,
    help="Write a shard raw when so much waits to be committed; 0 never. See actds recompress.",
)
@click.option(
    "--staging-mib",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Memory on the device between model and transfer; one step at least.",
)
@click.option(
    "--readouts/--no-readouts",
    default=True,
    show_default=True,
    help="Norm and 8 seeded projections of every computed row, also of those that are lost.",
)
@click.option(
    "--probes",
    type=click.Path(path_type=Path),
    help="Probes to read out as well: .npy or .safetensors, (n_probes, d_model) per hook.",
)
@click.option("--quiet", is_flag=True, help="Show no progress; the summary stands all the same.")
@click.option(
    "--metrics-port",
    type=click.IntRange(min=0, max=65535),
    help="Serve Prometheus metrics at this port, 0 for a free one; needs actds[metrics].",
)
@click.option(
    "--metrics-host",
    default="127.0.0.1",
    show_default=True,
    help="Address of the metrics; they are open to whoever can reach it.",
)
def write(
    out: str,
    model: Path,
    prompts: str,
    writer: str,
    canary: str | None,
    check: bool,
    hooks: str,
    max_tokens: int,
    temperature: float,
    seed: int,
    engine: tuple[str, ...],
    resume: bool,
    skip_broken: bool,
    store_dtype: str | None,
    order: Literal["permuted", "sequence"],
    rows_per_shard: int | None,
    overflow: str,
    ring_mib: int,
    raw_mib: int,
    staging_mib: int,
    readouts: bool,
    probes: Path | None,
    quiet: bool,
    metrics_port: int | None,
    metrics_host: str,
) -> None:
    """Harvest activations from a real engine into OUT.

    Serves every prompt, stores the hooks' rows of every token the engine computes, and accounts
    for every token. Ctrl-C drains, commits and seals; --resume goes on.
    """
    from actds_writers.config import WriteOptions
    from actds_writers.engines.base import find_engine

    options = WriteOptions(
        out=out,
        model=model,
        prompts=prompts,
        hooks=hooks,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        engine=find_engine(writer).parse(engine),
        resume=resume,
        skip_broken=skip_broken,
        order=order,
        rows_per_shard=rows_per_shard,
        ring_mib=ring_mib,
        store_dtype=store_dtype,
        overflow=overflow,
        raw_mib=raw_mib,
        staging_mib=staging_mib,
        readouts=readouts,
        probes=probes,
        quiet=quiet,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        writer=writer,
        canary=canary,
        check=check,
    )
    _run(options)


def _run(options: WriteOptions) -> None:
    from actds_writers.harvest.run import write as run

    written = run(options)
    click.echo(written.summary)
    if written.reason == "interrupted":
        click.echo(
            "Interrupted. What is committed is sealed; go on with the same command and --resume.",
            err=True,
        )
        click.get_current_context().exit(1)
