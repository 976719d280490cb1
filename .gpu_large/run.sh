#!/bin/bash
# bash .gpu_large/run.sh PART     from the repository's root, on one H200; everything goes to $OUT as it comes.
#   main   (240 s)  the engines of today beside fused projections + float8, KL 0 and 0.04, with traces
#   fused  (150 s)  fused projections alone, bf16, KL 0 and 0.04, with traces
#   batch  (240 s)  64 pictures a pass: today's, then fused
#   qwen   (240 s)  Qwen-Image, fused + float8, micro-batch 8 (compare with 1.07 images/s of today)
cd "$(dirname "$0")/.."
PART=${1:-main}; OUT=${OUT:-/tmp/out}; LIMIT=${2:-235}; BEGAN=$SECONDS
mkdir -p "$OUT"
export PYTHONPATH=$PWD:/tmp/site:$PYTHONPATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export TORCHINDUCTOR_CACHE_DIR=/tmp/inductor_large
DEVICE=${DEVICE:-cuda} MODEL=${MODEL:-sd3.5-medium}
left() { echo $((LIMIT - (SECONDS - BEGAN))); }
lane() {  # name, then arguments
    local name=$1; shift
    timeout -k 5 "$(left)" python3 -m benchmarks.iteration --device "$DEVICE" --work "/tmp/large_$PART/$name" "$@" \
        > "$OUT/$PART-$name.log" 2>&1
    echo "$name: rc $? after $((SECONDS - BEGAN)) s" | tee -a "$OUT/$PART.txt"
    cp /tmp/large_$PART/$name/results.jsonl "$OUT/$PART-$name.jsonl" 2>/dev/null
    cp /tmp/large_$PART/$name/trace_*.txt "$OUT/" 2>/dev/null
}
nvidia-smi --query-gpu=name,clocks.sm,memory.used --format=csv 2>/dev/null | tee "$OUT/$PART.txt"
LOCK=/tmp/large_$PART.lock
case $PART in
main)
    lane today --model $MODEL --lock $LOCK --kl 0 0.04 --repeats 1 --trace --variants "and frozen weights whole" &
    A=$!
    lane float8 --model $MODEL --lock $LOCK --kl 0 0.04 --repeats 1 --trace --variants "and float8 backward" &
    B=$!
    [ "$DEVICE" = cuda ] && timeout 60 python3 .gpu_large/products.py 2>&1 | tee "$OUT/products.txt"
    wait $A $B ;;
fused) lane fused --model $MODEL --kl 0 0.04 --repeats 2 --trace --variants "and projections fused" ;;
batch)
    lane today64 --model $MODEL --kl 0 --repeats 2 --batch 64 --micro-batch 64 --variants "and frozen weights whole"
    lane fused64 --model $MODEL --kl 0 --repeats 2 --batch 64 --micro-batch 64 --variants "and projections fused" ;;
qwen) lane qwen --model qwen-image --kl 0 --repeats 1 --micro-batch 8 --trace --variants "and float8 backward" ;;
esac
echo "--- $((SECONDS - BEGAN)) s"
for f in "$OUT"/$PART-*.log; do echo "== $f"; grep -v Warning "$f" | tail -45; done
cat "$OUT"/$PART-*.jsonl
