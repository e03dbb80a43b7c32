# Dumps, removes and cleans, and is in the middle of cleaning when the host pulls the plug.
. /scenarios/lib.sh
DATA=/mnt/pmem0/permafrost
check "permafrostd starts with --require-dax" start_permafrostd --require-dax --region-size 400M --clean-interval off
start_workload --size-mib 32 --modify-percent 40
check "first dump" permafrost dump --pid "$PID" --job cleaned --leave-running

# Each checkpoint refers to scattered pages of those before it, of which the last three stay.
another() {
    check "modify for generation $1" modify
    check "dump of generation $1" permafrost dump --pid "$PID" --job cleaned --leave-running
    [ "$1" -le 3 ] || check "removal of generation $(($1 - 3))" permafrost rm "cleaned@$(($1 - 3))"
}
for generation in 2 3 4 5; do another $generation; done
check "cleaning" eval 'permafrost --json gc >/tmp/gc'
cat /tmp/gc
check "has moved pages" between "$(json_number written_bytes </tmp/gc)" 100000 400000000
for generation in 6 7 8; do another $generation; done
permafrost gc &
tell "MARK mid-clean"
sleep 1000
