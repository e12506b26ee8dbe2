# shellcheck shell=bash
# Sourced by the scripts: numbered steps that show progress, keep a log, and end with the cause when they fail.

NUM_STEPS=${NUM_STEPS:-1}
STEP=0

# Prints a cause and ends the script.
fail() {
  printf '\nfailed: %s\n' "$*" >&2
  exit 1
}

# step "title" command...: runs the command with its output in $LOG; shows the log's end if it fails.
step() {
  local title=$1 started=$SECONDS
  shift
  STEP=$((STEP + 1))
  printf '[%d/%d] %s ... ' "$STEP" "$NUM_STEPS" "$title"
  printf '\n== %s\n' "$title" >>"$LOG"
  if "$@" >>"$LOG" 2>&1; then
    printf 'done (%d s)\n' $((SECONDS - started))
  else
    printf 'FAILED (%d s)\n\nThe last lines of %s:\n' $((SECONDS - started)) "$LOG" >&2
    tail -n 40 "$LOG" >&2
    fail "$title"
  fi
}

# show "title" command...: the same for a command whose output is the progress.
show() {
  local title=$1 started=$SECONDS
  shift
  STEP=$((STEP + 1))
  printf '[%d/%d] %s\n' "$STEP" "$NUM_STEPS" "$title"
  "$@" || fail "$title (after $((SECONDS - started)) s; the cause is above)"
  printf '[%d/%d] %s: done (%d s)\n' "$STEP" "$NUM_STEPS" "$title" $((SECONDS - started))
}
