# The same NVDIMM after the plug was pulled while pages were moved: every one of them is found, before or after its move.
. /scenarios/lib.sh
DATA=/mnt/pmem0/permafrost
check "permafrostd starts on what is left" start_permafrostd --require-dax --clean-interval off
cat /tmp/permafrostd.err
check "an unclean stop is seen" eval '[ "$(permafrost --json status | json_number unsafe_shutdowns)" = 1 ]'
permafrost --json ls >/tmp/ls
check "the last three checkpoints are there" eval '[ "$(grep -o "\"cleaned\"" /tmp/ls | wc -l)" = 3 ]'
check "every page verifies" permafrost verify
check "cleaning goes on" permafrost gc
check "every page verifies again" permafrost verify
mkdir -p $W
check "restore of the newest" permafrost restore cleaned
PID=$(json_number pid <$W/workload.status 2>/dev/null)
[ -n "$PID" ] || PID=$(pidof permafrost-workload)
check "it is sound" verify
check "and seven modifications old" eval '[ "$(json_number generation <$W/workload.status)" = 7 ]'
