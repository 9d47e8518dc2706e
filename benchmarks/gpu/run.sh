#!/usr/bin/env bash
# One step of the first hour on a GPU: see README.md beside this file.
set -euo pipefail
cd "$(dirname "$0")/../.."
step=${1:?a step: host, path, vllm, harvest, graphs or cost}
PY=${PY:-python3} OUT=${OUT:-build/gpu} SITE=build/gpu-site WHEELS=build/gpu-wheels
mkdir -p "$OUT"
if [ -d "$WHEELS" ] && [ ! -d "$SITE" ]; then
  "$PY" -m pip install --quiet --no-index --no-deps --target "$SITE" "$WHEELS"/*.whl
fi
export PYTHONPATH=.:writers:validators:testing:tests:$SITE HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
MODEL=${MODEL:-$OUT/model} PROMPTS=$OUT/prompts.jsonl
exec > >(tee -a "$OUT/$step.log") 2>&1

harvest() { # NAME HOOKS [engine arguments]
  local name=$1 hooks=$2; shift 2
  rm -rf "$OUT/$name"
  "$PY" -m actds write "$OUT/$name" --model "$MODEL" --prompts "$PROMPTS" --hooks "$hooks" --max-tokens 32 \
    --temperature 0 --engine-arg dtype=bfloat16 --engine-arg gpu_memory_utilization=0.4 "$@"
  "$PY" -m actds validate "$OUT/$name" --level deep
}

case $step in
host)
  nvidia-smi; df -h /dev/shm
  "$PY" benchmarks/gpu/rows.py register
  for test in $("$PY" -m pytest -q --collect-only -m "not full" tests/writers/test_cuda.py -k gpu | grep ::); do
    timeout 300 "$PY" -m pytest -q "$test" || true
  done ;;
path) "$PY" benchmarks/bench_cuda.py ;;
vllm)
  "$PY" -c 'import vllm, torch; print(vllm.__version__, torch.__version__, torch.cuda.get_device_name())'
  "$PY" benchmarks/gpu/rows.py model "$MODEL" "$PROMPTS"
  harvest small resid_post:0 ;;
harvest)
  all="embed;resid_pre:all;resid_mid:all;resid_post:all;attn_out:all;mlp_in:all;mlp_out:all;q:all;k:all;v:all;z:all;final"
  harvest eager "$all" --engine-arg enforce_eager=true
  harvest default "$all"
  "$PY" benchmarks/gpu/rows.py compare "$OUT/eager" "$OUT/default" ;;
graphs)
  for mode in FULL PIECEWISE FULL_DECODE_ONLY; do
    harvest "$mode" "resid_post:all" --engine-arg "compilation_config={\"cudagraph_mode\":\"$mode\"}" || true
  done
  VLLM_USE_V2_MODEL_RUNNER=0 harvest first-runner "resid_post:all" || true
  for mode in FULL PIECEWISE FULL_DECODE_ONLY first-runner; do
    "$PY" benchmarks/gpu/rows.py compare "$OUT/eager" "$OUT/$mode" || true
  done ;;
cost)
  for batch in 1 32 256; do
    timeout 180 "$PY" benchmarks/bench_engine.py --dtype bfloat16 --memory-share 0.15 --rounds 5 --batch "$batch" \
      --requests $((batch * 4)) --compiled --variants none,again,two,all,all-naive || true
  done ;;
*) echo "no step $step" >&2; exit 2 ;;
esac
