# One node's part of a job: the first TRAINERS nodes train, the SERVERS nodes behind them serve.
#
# Expects  NODE  the place of this node        HOSTS  addresses of all nodes in that order, one a line
# and what `fastturn launch` has written above. Ends with 1, and says which role ended and where its
# log is, as soon as one process of this node ends before it should; the scheduler then ends the
# other nodes.
set -um -o pipefail # m: every process below leads a group of its own, to be ended with its children
export PATH="$PWD/.venv/bin:$PATH"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$STOP_S
readarray -t hosts <<<"$HOSTS"
host=${hosts[NODE]}
slots=$((GPUS / PARALLEL)) # servers of a node
logs=$OUT/logs
ended=$logs/ended # touched when the training is over: servers have no other way to know
stopping=''
mkdir -p "$logs"

urls=()
for ((n = 0; n < SERVERS * slots; n++)); do
  # Ports differ on all nodes: a server's random numbers follow from its port.
  urls+=("http://${hosts[TRAINERS + n / slots]}:$((PORT + n))")
done
printf -v list ',%s' "${urls[@]}"
pairs=("${PAIRS[@]}" "rollout.urls=${list:1}")

die() { # ROLE WHAT [LOG]
  printf 'error: %s on %s (node %s) %s\n' "$1" "$host" "$NODE" "$2" >&2
  if [ -n "${3:-}" ]; then
    printf 'the end of %s:\n' "$3" >&2
    tail -n 20 "$3" >&2
  fi
  exit 1
}

finish() { # every process group of this node: asked first, then killed
  local group try
  for group in $(jobs -p); do kill -TERM -- "-$group" 2>/dev/null; done
  for ((try = 0; try < 50; try++)); do
    [ -n "$(jobs -pr)" ] || break
    sleep 0.2
  done
  for group in $(jobs -p); do kill -KILL -- "-$group" 2>/dev/null; done
}
trap finish EXIT
trap 'exit 143' TERM INT # the scheduler ends this node: `finish` runs, whatever is being waited for

await() { # PID: its exit status; a signal that this shell handles ends `wait` early
  local code=0
  wait "$1" || code=$?
  while kill -0 "$1" 2>/dev/null; do
    code=0
    wait "$1" || code=$?
  done
  return "$code"
}

serve() {
  trap : USR1 # servers stop when the trainer has
  local slot n log line gpus started=$logs/server-node$NODE.started
  local -A running=()
  touch "$started"
  for ((slot = 0; slot < slots; slot++)); do
    n=$(((NODE - TRAINERS) * slots + slot))
    log=$logs/server-$n-$host.log
    gpus=$(seq -s, $((slot * PARALLEL)) $(((slot + 1) * PARALLEL - 1)))
    line=$(fastturn serve "$RECIPE" "${pairs[@]}" "${SERVE[@]}" --host "$host" \
      --port $((PORT + n)) --tensor-parallel "$PARALLEL" 2>>"$log") ||
      die "server $n" "has no command" "$log"
    printf 'server %s on %s (node %s), GPUs %s: %s\n' "$n" "$host" "$NODE" "$gpus" "$line"
    (
      trap '' USR1
      eval "CUDA_VISIBLE_DEVICES=$gpus exec env $line"
    ) >>"$log" 2>&1 &
    running[$n]=$!
  done
  until [ "$ended" -nt "$started" ]; do
    for n in "${!running[@]}"; do
      kill -0 "${running[$n]}" 2>/dev/null && continue
      local code=0
      wait "${running[$n]}" || code=$?
      die "server $n" "ended with status $code" "$logs/server-$n-$host.log"
    done
    sleep 1
  done
}

train() {
  local n log=$logs/trainer-$NODE-$host.log code=0 trainer=''
  trap 'stopping=1; [ -z "$trainer" ] || kill -INT "$trainer"' USR1
  for ((n = 0; n < ${#urls[@]}; n++)); do
    until curl -fsS --noproxy '*' --max-time 5 "${urls[n]}/health" >/dev/null 2>>"$log"; do
      [ -z "$stopping" ] || break 2
      [ "$SECONDS" -lt "$READY_S" ] ||
        die "trainer $NODE" "gave up: server $n at ${urls[n]} was not ready after $READY_S s" "$log"
      sleep 2
    done
  done
  if [ -n "$stopping" ]; then
    touch "$ended"
    return
  fi
  (
    trap '' USR1
    exec torchrun --nnodes "$TRAINERS" --nproc-per-node "$GPUS" --rdzv-backend c10d \
      --rdzv-id fastturn --rdzv-endpoint "${hosts[0]}:$MEET" --local-addr "$host" \
      scripts/train.py "$RECIPE" "${pairs[@]}" --out "$OUT" --resume
  ) >>"$log" 2>&1 &
  trainer=$!
  printf 'trainer %s on %s (node %s): log in %s\n' "$NODE" "$host" "$NODE" "$log"
  await "$trainer" || code=$?
  # A trainer that was told to stop has saved; whatever its status, the next one resumes.
  [ "$code" = 0 ] || [ -n "$stopping" ] || die "trainer $NODE" "ended with status $code" "$log"
  touch "$ended"
}

if [ "$NODE" -lt "$TRAINERS" ]; then train; else serve; fi
