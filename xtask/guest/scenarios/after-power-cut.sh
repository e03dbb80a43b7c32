# The same NVDIMM after the plug was pulled in mid-dump: what was sealed is there, the half one is not.
. /scenarios/lib.sh
DATA=/mnt/pmem0/permafrost
check "permafrostd starts on what is left" start_permafrostd --require-dax
cat /tmp/permafrostd.err
permafrost --json status >/tmp/status; cat /tmp/status
check "an unclean stop is seen" eval '[ "$(json_number unsafe_shutdowns </tmp/status)" = 1 ]'
permafrost ls
permafrost --json ls >/tmp/ls
check "both sealed checkpoints are there" eval '[ "$(grep -o "\"sealed\"" /tmp/ls | wc -l)" = 2 ]'
check "nothing of the torn dump is" eval '! grep -q torn /tmp/ls'
check "every page verifies" permafrost verify
mkdir -p $W
check "restore of the newest" permafrost restore sealed
PID=$(json_number pid <$W/workload.status 2>/dev/null)
[ -n "$PID" ] || PID=$(pidof permafrost-workload)
check "it is sound" verify
check "and one modification old" eval '[ "$(json_number generation <$W/workload.status)" = 1 ]'
kill -9 "$PID"
check "its pid is free again" within 10 gone
check "restore of the one before" permafrost restore sealed@1
check "that is sound" verify
check "and unmodified" eval '[ "$(json_number generation <$W/workload.status)" = 0 ]'
