#!/usr/bin/env bash
# One step of the first hour on a GPU: see README.md beside this file.
# Exit status: 0 done, 1 a part failed or was stopped, 2 no such step, 3 no GPU, 4 a package is missing.
set -uo pipefail
cd "$(dirname "$0")/../.."
step=${1:-none}
PY=${PY:-python3} OUT=${OUT:-build/gpu} DEVICE=${DEVICE:-cuda} LIMIT=${LIMIT:-580}
CARRY=${CARRY:-build/gpu-carry} SITE=${SITE:-build/gpu-site}
MODEL=$OUT/model PROMPTS=$OUT/prompts.jsonl LOG=$OUT/$step.log FIGURES=$OUT/gpu-$step.md
ALL="embed;resid_pre:all;resid_mid:all;resid_post:all;attn_out:all;mlp_in:all;mlp_out:all;q:all;k:all;v:all;z:all;final"
case $step in
host | path) needs=(numpy pyarrow zarr pytest hypothesis) ;;
vllm | harvest | graphs | cost) needs=(numpy pyarrow zarr vllm) ;;
*) echo "no step $step: host, path, vllm, harvest, graphs or cost" >&2; exit 2 ;;
esac
export PYTHONPATH=.:writers:validators:testing:tests:$SITE HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0} # FlashInfer is not carried
engine=(--engine-arg dtype=bfloat16 --engine-arg gpu_memory_utilization=0.4) actds=(-m actds) default=()
modes=(FULL PIECEWISE FULL_DECODE_ONLY) n_prompts=48 n_tokens=32
bench=(--rounds 5 --dtype bfloat16 --memory-share 0.15 --max-tokens 64) compiled=none,again,two,all plain=none,all,all-naive
batches=32,1,256 slower=1 hidden=3072
if [ "$DEVICE" = cpu ]; then # a rehearsal, on small sizes, with graphs that replay on a CPU
  export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
  engine=(--engine-arg dtype=float32 --engine-arg max_model_len=512 --engine-arg distributed_executor_backend=uni)
  actds=(-m actds_testing.cpu_graphs "$OUT/replays.json") modes=(PIECEWISE) n_prompts=12 n_tokens=6
  default=(--engine-arg "compilation_config=$("$PY" -c "
from actds_testing.cpu_graphs import compilation
print(compilation('eager'))")")
  bench=(--rounds 1 --max-tokens 4) compiled=none,two plain=none,all-naive batches=2,1 slower=5 hidden=96
fi

bounded() { # SECONDS COMMAND...: at most that long, and not beyond the limit of the step
  local limit=$(($1 * slower)) left=$((LIMIT - SECONDS)); shift
  timeout -k 10 $((left < limit ? (left > 0 ? left : 1) : limit)) "$@"
}

part() { # NAME SECONDS COMMAND...: a line of the figure file; what follows runs whatever becomes of it
  local name=$1 limit=$2 status=0 said began=$SECONDS; shift 2
  bounded "$limit" "$@" || status=$?
  case $status in 0) said=done ;; 124 | 137) said=stopped ;; *) said="failed ($status)" ;; esac
  [ "$status" = 0 ] || failed=1
  parts+=("| $name | $said | $((SECONDS - began)) |")
  figures
  return $status
}

figures() { # what is known so far; the tables are those that the parts printed
  { echo "# Step $step: $card"; echo; echo "$(date -u +%F), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
    [ "$DEVICE" != cpu ] || { echo; echo "A rehearsal: of the figures here, none of a GPU."; }
    echo; echo "| part | outcome | s |"; echo "| --- | --- | ---: |"; printf '%s\n' "${parts[@]}"; echo
    grep -E '^(\||[^|]*: [0-9,]+ rows; |[^|]*requests got another |(eager|compiled), |[0-9]+ MiB, )' "$LOG"; } > "$FIGURES"
}

harvest() { # NAME HOOKS [engine arguments]
  local name=$1 hooks=$2; shift 2
  rm -rf "${OUT:?}/$name"
  part "$name: rows written" 240 "$PY" "${actds[@]}" write "$OUT/$name" --model "$MODEL" --prompts "$PROMPTS" --hooks "$hooks" \
    --max-tokens $n_tokens --temperature 0 "${engine[@]}" "$@" &&
    part "$name: validated" 60 "$PY" -m actds validate "$OUT/$name" --level deep
}

cost() { # BATCHES OPTIONS...
  local batches=$1; shift
  part "batch $batches $*" 480 "$PY" benchmarks/bench_engine.py --model "$OUT/large" "${bench[@]}" --batch "$batches" "$@"
}

compare() { part "rows of eager and $1" 60 "$PY" benchmarks/gpu/rows.py compare "$OUT/eager" "$OUT/$1"; }
model() { [ -e "$MODEL/config.json" ] || part "a model" 120 "$PY" benchmarks/gpu/rows.py model "$MODEL" "$PROMPTS" $n_prompts; }
eager() { model; [ -d "$OUT/eager/seal" ] || harvest eager "$ALL" --engine-arg enforce_eager=true; }

run() {
  case $step in
  host)
    df -h /dev/shm
    if [ "$DEVICE" = cpu ]; then backend=fake; else
      backend=gpu
      nvidia-smi
      part "page-locked memory" 120 "$PY" benchmarks/gpu/rows.py register
    fi
    # A process each: after an assert on the device, a process cannot use the device any more.
    for test in $(bounded 90 "$PY" -m pytest -q --collect-only -m "not full" tests/writers/test_cuda.py -k "$backend" | grep ::); do
      part "${test#*::}" 90 "$PY" -m pytest -q "$test"
    done
    if [ "$backend" = gpu ] && command -v compute-sanitizer; then
      part compute-sanitizer 120 compute-sanitizer --error-exitcode 9 "$PY" -m pytest -q tests/writers/test_cuda.py -k "gpu and copier"
    fi ;;
  path) part "op and transfer" 570 "$PY" benchmarks/bench_cuda.py ;;
  vllm) model; harvest small resid_post:0 "${default[@]}" ;;
  harvest) eager; harvest default "$ALL" "${default[@]}" && compare default ;;
  graphs)
    eager
    for mode in "${modes[@]}"; do
      chosen=("${default[@]}")
      [ "$DEVICE" = cpu ] || chosen=(--engine-arg "compilation_config={\"cudagraph_mode\":\"$mode\"}")
      harvest "$mode" resid_post:all "${chosen[@]}" && compare "$mode"
    done
    export VLLM_USE_V2_MODEL_RUNNER=0
    harvest first-runner resid_post:all "${default[@]}" && compare first-runner ;;
  cost) # naive hooks run in an eager engine alone
    [ -e "$OUT/large/config.json" ] || part "a large model" 60 "$PY" benchmarks/gpu/rows.py large "$OUT/large" $hidden
    cost $batches --compiled --variants $compiled
    cost ${batches%%,*} --variants $plain ;;
  esac
}

mkdir -p "$OUT"
"$PY" benchmarks/gpu/packages.py unpack "$CARRY" "$SITE" || exit 4
card=$("$PY" benchmarks/gpu/rows.py card "$DEVICE" "${needs[@]}") || { status=$?; echo "$step: $card"; exit $status; }
[ "$DEVICE $step" != "cpu path" ] || { echo "$step: needs a GPU, in a rehearsal as well"; exit 3; }
failed=0 parts=()
rm -f "$FIGURES" # of a run before
echo "$step on $card: log in $LOG, figures in $FIGURES"
run > "$LOG" 2>&1
figures
cat "$FIGURES"
[ $failed = 0 ] || tail -n 30 "$LOG"
exit $failed
