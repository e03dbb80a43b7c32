# Seals two checkpoints, and stands in the middle of a third dump when the host pulls the plug.
. /scenarios/lib.sh
DATA=/mnt/pmem0/permafrost
mkdir -p $DATA
check "permafrostd starts with --require-dax" start_permafrostd --require-dax --region-size 400M
start_workload --size-mib 32
check "first dump" permafrost dump --pid "$PID" --job sealed --leave-running
check "modify a tenth" modify
check "second dump" permafrost dump --pid "$PID" --job sealed --leave-running
check "modify a tenth again" modify

permafrost dump --pid "$PID" --job torn --leave-running &
# In mid-dump: some bytes are there, and CRIU is stopped before it can send the rest.
receiving() { permafrost --json status | tr -d ' \n' | grep -q '"received_bytes":[1-9]'; }
# Its command line, as the loader that starts it has it: …/criu dump ….
stop_criu() {
    for process in /proc/[0-9]*; do
        tr '\0' ' ' <"$process/cmdline" 2>/dev/null | grep -q 'bin/criu dump' || continue
        kill -STOP "${process##*/}"
        within 5 grep -q '^State:.*stopped' "$process/status" && return 0
    done
    return 1
}
check "a third dump is on its way" within 30 receiving
check "CRIU is stopped in the middle of it" stop_criu
permafrost --json status
check "and not at its end" eval '! permafrost --json ls | grep -q torn'
tell "MARK mid-dump"
sleep 1000
