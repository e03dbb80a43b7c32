# permafrostd on a region that is mapped with MAP_SYNC, and the real CRIU 3.17.1, which speaks the 24-byte
# dialect and knows from soft-dirty what it need not send.
. /scenarios/lib.sh
DATA=/mnt/pmem0/permafrost
check "permafrostd starts with --require-dax" start_permafrostd --require-dax --region-size 400M
permafrost --json status >/tmp/status; cat /tmp/status
check "its region is DAX" eval 'json_has medium dax </tmp/status'
check "and says so" eval 'json_has guarantee ".*MAP_SYNC" </tmp/status'
check "CRIU is 3.17.1" eval 'criu --version | grep -q "Version: 3.17.1"'

start_workload --size-mib 64
BEFORE=$(json_number counter <$W/workload.status)
mkdir -p /tmp/w1 /tmp/w2
check "pre-dump" permafrost dump --pid "$PID" --job guest --pre-dump --leave-running --work-dir /tmp/w1 -- -v4
check "modify a tenth" modify
check "incremental dump" permafrost dump --pid "$PID" --job guest --work-dir /tmp/w2 -- -v4
check "the workload is gone" within 10 gone

# What CRIU itself counted, a line for each mapping: pages it sent (1), and holes it left to the parent (2).
pages() {
    cat "$1"/*.log | sed -n "s/.*Pagemap generated: \([0-9]*\) pages ([0-9]* lazy) \([0-9]*\) holes.*/\\$2/p" |
        awk '{ sum += $1 } END { print sum + 0 }'
}
echo "pre-dump $(pages /tmp/w1 1) pages, dump $(pages /tmp/w2 1) pages and $(pages /tmp/w2 2) holes"
check "the pre-dump sent every page" between "$(pages /tmp/w1 1)" 16384 16600
check "the dump sent the modified tenth" between "$(pages /tmp/w2 1)" 1638 1850
check "and left the rest to the parent" between "$(pages /tmp/w2 2)" 14700 14900
permafrost ls
check "verify" permafrost verify

check "restore" permafrost restore guest
check "the restored workload is sound" verify
check "its counter went on" [ "$(json_number counter <$W/workload.status)" -gt "$BEFORE" ]
kill -9 "$PID"

kill "$DAEMON"
check "permafrostd stops cleanly" wait "$DAEMON"
check "and starts on the same region" start_permafrostd --require-dax
permafrost --json status >/tmp/status
check "with a clean shutdown behind it" eval '[ "$(json_number unsafe_shutdowns </tmp/status)" = 0 ]'
check "restore after the restart" permafrost restore guest
check "sound again" verify
kill -9 "$PID"
check "its pid is free again" within 10 gone

# Nothing of ours on CRIU's side: a bare dump of a tree to the well-known port, over TCP.
start_workload --size-mib 16 --members 2 --shared-mib 4 --threads 2 --open-file
mkdir -p /tmp/plain
check "bare criu dump of a tree" criu dump -t "$PID" -D /tmp/plain --page-server --address 127.0.0.1 --port 7117
check "the tree is gone" within 10 gone
permafrost ls
check "adopt" permafrost adopt --job plain --images-dir /tmp/plain
check "restore of the adopted" permafrost restore plain
check "the tree is sound" verify
