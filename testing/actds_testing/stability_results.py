"""Results of `actds stability` made by hand, for tests of its pages: plain, many, and hostile."""

from __future__ import annotations

from actds_studies.stability.result import (
    AUROC_MAXIMUM,
    AUROC_MEAN,
    FVU,
    RAW,
    ArmResult,
    CrossValue,
    Features,
    Gap,
    Likeness,
    Limits,
    PairResult,
    Rare,
    Stability,
    Trained,
    answer,
    compare,
    judged_gaps,
    verdicts,
)

__all__ = ["hostile", "made", "many"]

CHANCE = 0.2


def made(arms: tuple[str, ...] = ("cached", "uncached", "hybrid"), seeds: int = 7) -> Stability:
    """Return a result in which the second arm is within the floor and the others beyond it."""
    limits = Limits(seeds=seeds)
    pairs = []
    for seed in range(seeds):
        after = (seed, (seed + 1) % seeds)
        pairs.append(_pair(arms[0], "other order", (seed, seed), 0.9))
        pairs.append(_pair(arms[0], "other seed", after, 0.5))
        for n, arm in enumerate(arms[1:]):
            pairs.append(_pair(arm, "same start", (seed, seed), 0.9 - 0.3 * (n > 0)))
            pairs.append(_pair(arm, "other seed", after, 0.5 - 0.2 * (n > 0)))
    comparisons = compare(pairs, arms[0], CHANCE, limits)
    judged = verdicts(comparisons, arms[0], CHANCE, limits)
    cross = judged_gaps(_cross(arms), limits)
    return Stability(
        limits=limits,
        hook="resid_post.10",
        label="labels.label == 'code'",
        d_model=576,
        n_features=2304,
        n_rows=17_253,
        n_seen=172_032,
        scale=0.1014,
        n_threads=1,
        chance=CHANCE,
        rare=Rare(most=2, share=0.108),
        arms=[
            ArmResult(
                name=arm, words=f"{arm}, phase prefill", digest="ab" * 32,
                models=["org/model-8b"], engines=["vllm 0.11.0"], dtype="bfloat16",
                started_ns=(1_763_800_000 + 3600 * (arm != arms[0])) * 10**9, n_there=23_460,
                n_rows=17_253, shares={"prefill": 17_253, "decode": 0}, n_common=9_149, n_sinks=1,
                n_scored=3_642, n_requests=52,
            )
            for arm in arms
        ],
        answer=answer(judged, comparisons, arms[0], seeds, cross),
        verdicts=judged,
        comparisons=comparisons,
        pairs=pairs,
        cross=cross,
        dictionaries=[
            Trained(arm=arm, seed=seed, order=seed, fvu=0.214, n_alive=2_300, sha256="cd" * 32)
            for arm in arms
            for seed in range(seeds)
        ],
    )  # fmt: skip


def _cross(arms: tuple[str, ...]) -> list[CrossValue]:
    """Return values of which the last arm's dictionaries fit the rows of others by 0.1 less."""
    cross = []
    for trained_on in (*arms, RAW):
        for rows_of in arms:
            for use in (FVU, AUROC_MAXIMUM, AUROC_MEAN):
                if (trained_on, use) == (RAW, FVU):
                    continue
                away = 0.1 * (trained_on == arms[-1]) - 0.1 * (rows_of == arms[-1])
                gap = Gap(value=away, low=away - 0.01, high=away + 0.01, floor=0.002,
                          p=None if trained_on == RAW else 1 - 0.9999 * bool(away))  # fmt: skip
                for rows in ("all", "decode step 40 to 60", "rare tokens"):
                    cross.append(
                        CrossValue(
                            trained_on=trained_on, rows_of=rows_of, rows=rows, use=use,
                            n_rows=3_642, n_requests=52, value=0.294, low=0.26, high=0.327,
                            seeds_low=0.293, seeds_high=0.295, l0=32.0,
                            difference=None if trained_on == rows_of else gap,
                            fvu_reference=0.3 if use == FVU else None,
                        )
                    )  # fmt: skip
    return cross


def _pair(arm: str, kind: str, seeds: tuple[int, int], matched: float) -> PairResult:
    features = Features(
        n=2_200, kept=matched - 0.05, split=0.05, merged=0.03, gone=0.97 - matched,
        split_into=[0.04, 0.01, 0.0], merged_from=[0.03, 0.0, 0.0],
    )  # fmt: skip
    likeness = Likeness(
        matched=matched, nearest=matched + 0.05, share_70=matched / 2, share_90=matched / 4,
        features=features,
    )  # fmt: skip
    return PairResult(arm=arm, kind=kind, seeds=seeds, likeness=likeness)  # type: ignore[arg-type]


def many() -> Stability:
    """Return a result of as many arms as there may be, and many seeds."""
    return made(tuple(f"arm_of_a_long_name_{n:02}" for n in range(26)), 16)


def hostile() -> Stability:
    """Return a result whose words try to be markup and control a terminal."""
    bad = "\x1b[31m<script>alert(1)</script>" + "W" * 400
    return made((bad, f"b{bad}"), 2)
