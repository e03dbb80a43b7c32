# Seals two checkpoints, and stands in the middle of a third dump when the host pulls the plug.
. /scenarios/lib.sh
DATA=/mnt/pmem0/permafrost
check "permafrostd starts with --require-dax" start_permafrostd --require-dax --region-size 400M
start_workload --size-mib 32
check "first dump" permafrost dump --pid "$PID" --job sealed --leave-running
check "modify a tenth" modify
check "second dump" permafrost dump --pid "$PID" --job sealed --leave-running
check "modify a tenth again" modify

# The third goes through a relay that passes on so many reads (26 MB at most, of 32) and then nothing more: CRIU
# stands still in mid-dump.
permafrost --json open --job torn --pid "$PID" >/tmp/open || fail "open a session"
ADDRESS=$(tr -d ' \n' </tmp/open | sed 's/.*"address":"\([^"]*\)".*/\1/')
mkfifo /tmp/replies
nc -l -p 9999 </tmp/replies | (dd bs=64k count=400 2>/dev/null; sleep 1000) | nc "${ADDRESS%:*}" "${ADDRESS##*:}" >/tmp/replies &
check "the relay listens" within 10 eval 'netstat -ltn | grep -q ":9999 "'
mkdir -p /tmp/torn
criu dump -t "$PID" -D /tmp/torn --page-server --address 127.0.0.1 --port 9999 &

received() { permafrost --json status | json_number received_bytes; }
stands_still() {
    before=$(received)
    sleep 0.5
    [ "${before:-0}" -gt 0 ] && [ "$before" = "$(received)" ]
}
check "a third dump has come to a standstill" within 30 stands_still
echo "$(received) bytes received"
check "in its middle" between "$(received)" 4096 33000000
check "with the task in CRIU's hands" grep -q '^TracerPid:.[1-9]' "/proc/$PID/status"
tell "MARK mid-dump"
sleep 1000
