#!/usr/bin/env bash
# Runs a program as two ranks under every launcher that is installed here: torchrun, mpirun of Open MPI and of MPICH,
# srun. Each has to succeed; then it runs again, one rank is killed, and it has to fail and leave no rank behind.
#
#   scripts/launchers.sh PROGRAM [ARGUMENTS]
#
# PROGRAM is one rank of two, and works for some seconds at least: on a machine with two GPUs
# `candle-quant generate MODEL --distributed -n 2000 --seed 1`; on one without, in the environment of
# scripts/test-cuda.sh, its program of tests with `--exact ranks::rank --nocapture`.
# TORCHRUN_OPTIONS, OPENMPI_OPTIONS, MPICH_OPTIONS and SRUN_OPTIONS go to the launchers.
set -uo pipefail
[ $# -gt 0 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export CANDLE_QUANT_SECRET=${CANDLE_QUANT_SECRET:-of this run of launchers.sh only}
export MASTER_ADDR=127.0.0.1 PIDS=$folder/pids
failures=0

# Tells the process of each rank, and becomes the program.
cat > "$folder/rank" <<'RANK'
#!/usr/bin/env bash
echo $$ > "$PIDS.${RANK:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$SLURM_PROCID}}}"
exec "$@"
RANK
chmod +x "$folder/rank"

launch() {
  MASTER_PORT=$((20000 + RANDOM % 10000))
  export MASTER_PORT
  local launcher=$1
  shift
  # shellcheck disable=SC2086
  case $launcher in
    torchrun) torchrun --no_python --nproc_per_node 2 --master_port $MASTER_PORT ${TORCHRUN_OPTIONS-} "$folder/rank" "$@" ;;
    mpirun.openmpi) mpirun.openmpi -np 2 ${OPENMPI_OPTIONS-} "$folder/rank" "$@" ;;
    mpirun.mpich) mpirun.mpich -np 2 ${MPICH_OPTIONS-} "$folder/rank" "$@" ;;
    srun) env -u MASTER_ADDR -u MASTER_PORT srun --ntasks 2 ${SRUN_OPTIONS-} "$folder/rank" "$@" ;;
  esac > "$folder/log" 2>&1
}

for launcher in torchrun mpirun.openmpi mpirun.mpich srun; do
  type -P "$launcher" > "$folder/path" || { echo "$launcher: not installed"; continue; }
  if RANK_DOES=end launch $launcher "$@"; then
    echo "$launcher: two ranks ended well"
  else
    echo "$launcher: FAILED"; cat "$folder/log"; failures=$((failures + 1))
  fi

  rm -f "$PIDS".*
  RANK_DOES='stop at computed' launch $launcher "$@" &
  running=$!
  until [ -s "$PIDS.0" ] && [ -s "$PIDS.1" ]; do sleep 0.1; done
  sleep "${KILL_AFTER:-2}"
  kill -KILL "$(cat "$PIDS.1")"
  wait $running
  status=$?
  if [ $status -ne 0 ] && timeout 60 tail --pid="$(cat "$PIDS.0")" -f "$folder/log" > "$folder/tail"; then
    message=$(grep -o 'Error: rank 1: .*' "$folder/log" | head -1)
    echo "$launcher: a rank killed: exit code $status; ${message:-the launcher ended the other before it said why}"
  else
    echo "$launcher: a rank killed: FAILED, exit code $status"; cat "$folder/log"; failures=$((failures + 1))
  fi
done
exit $failures
