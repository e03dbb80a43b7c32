# Pre-copy with real soft-dirty bits on two nodes of a cluster, each with a copy, and through an agent: what the rounds
# store is on both nodes, and an agent that is killed between rounds or in the freeze leaves the process running.
. /scenarios/lib.sh
export PERMAFROST_CRIU=/tmp/criu
AT=/mnt/pmem0
fail() {
    tail -n 8 /tmp/*.err /tmp/dump
    tell "FAIL $*"
    exit 1
}

# start NAME COMMAND…: starts a daemon, and sets the variable of that name to its pid.
start() {
    name=$1
    shift
    "$@" >"/tmp/$name.out" 2>"/tmp/$name.err" &
    eval "$name=$!"
}
start_node() {
    start "$1" permafrostd --config none --data-dir "$AT/$1" --run-dir "/run/$1" --listen none --region-size 200M \
        --identity "/tmp/$1" --listen-peers "127.0.0.1:$2" --catalog etcd://127.0.0.1:2379 --copies 2
}
start_agent() {
    start agent permafrost agent --identity /tmp/compute --node a=127.0.0.1:7120 --node b=127.0.0.1:7121 \
        --run-dir /run/agent --listen none
}
on() { node=$1; shift; PERMAFROST_SOCKET=/run/$node/control.sock permafrost "$@"; }
lists() { on "$1" --json ls | tr -d ' \n' | grep -o '"kind":"[a-z-]*"' | tr '\n' ' '; }
# has_copies KIND: the checkpoint of that kind, the only one, is on both nodes.
has_copies() { on a --json ls | tr -d ' \n' | grep -q "\"kind\":\"$1\".*\"nodes\":\[\"a\",\"b\"\]"; }

# A CRIU after whose pre-dumps the process has modified a part of its memory. With /tmp/hold, the second pre-dump waits
# before it begins. With /tmp/doomed, the process of that pid is killed as soon as a dump has frozen the task.
cat >$PERMAFROST_CRIU <<'CRIU'
#!/bin/sh
. /scenarios/lib.sh
PID=$(cat /tmp/pid)
case $1 in
dump)
    [ -e /tmp/doomed ] || exec criu "$@"
    criu "$@" &
    criu=$!
    until grep -q '^State:.t' "/proc/$PID/status"; do sleep 0.01; done
    kill -9 "$(cat /tmp/doomed)"
    echo >/tmp/doomed-frozen
    wait $criu
    exit ;;
pre-dump) ;;
*) exec criu "$@" ;;
esac
count=$(($(cat /tmp/rounds 2>/dev/null) + 1))
echo $count >/tmp/rounds
if [ $count = 2 ] && [ -e /tmp/hold ]; then
    : >/tmp/held
    while [ -e /tmp/hold ]; do sleep 0.05; done
fi
criu "$@" || exit
modify
CRIU
chmod 755 $PERMAFROST_CRIU
begin() { rm -f /tmp/rounds /tmp/held /tmp/doomed /tmp/doomed-frozen; }

cd /tmp
check "certificates" eval 'permafrost pki init --dir ca &&
    permafrost pki issue --dir ca --name a --role node --host 127.0.0.1 --out a &&
    permafrost pki issue --dir ca --name b --role node --host 127.0.0.1 --out b &&
    permafrost pki issue --dir ca --name compute --role agent --namespace default --delete --out compute'
start etcd etcd --data-dir /tmp/etcd-data
start_node a 7120
start_node b 7121
start_agent
for node in a b agent; do
    check "$node is ready" on $node status --wait 120s
done
check "each node knows the other" within 60 eval 'on a node ls | grep -q "^b "'

# More than the pages with which a pre-copy ends at once, 1024, in little memory: emulated nodes are slow.
start_workload --size-mib 24 --modify-percent 18
echo "$PID" >/tmp/pid

# On a node.
begin
: >/tmp/hold
PERMAFROST_SOCKET=/run/a/control.sock permafrost --json dump --pid "$PID" --job guest --pre-copy --durability all \
    >/tmp/dump 2>/tmp/dump.err &
COMMAND=$!
check "a second round begins" within 60 test -e /tmp/held
check "the first is stored on both nodes" has_copies pre-copy
rm -f /tmp/hold
check "the dump with pre-copy on two nodes" wait $COMMAND
cat /tmp/dump
check "it has two rounds" [ "$(cat /tmp/rounds)" = 2 ]
check "the dump sent the last modified part" between "$(json_number pages_written </tmp/dump)" 1105 1400
check "the process is gone" within 60 gone
check "only the dump is left" within 60 eval '[ "$(lists a)" = "\"kind\":\"full\" " ]'
check "the dump is stored on both nodes" has_copies full
for node in a b; do
    check "$node verifies its copy" on $node verify
done
check "restore on the other node" on b restore guest
check "the restored process is sound" verify

# Through the agent, which is killed between two rounds.
begin
: >/tmp/hold
PERMAFROST_SOCKET=/run/agent/control.sock permafrost dump --pid "$PID" --job guest --pre-copy >/tmp/killed.out 2>&1 &
COMMAND=$!
check "a second round begins through the agent" within 120 test -e /tmp/held
kill -9 "$agent"
rm -f /tmp/hold
wait $COMMAND
code=$?
cat /tmp/killed.out
check "the command fails without its agent" [ $code != 0 ]
check "no CRIU is left" within 60 eval '! pgrep -f /debian/bin/criu >/dev/null'
check "its process is unharmed" verify
start_agent
check "the agent is ready again" on agent status --wait 60s

# dump_through_agent ARGUMENTS…: waits while the node keeps the session of an agent that was killed before any page came.
dump_through_agent() {
    tries=0
    until on agent --json dump --pid "$PID" --job guest --pre-copy "$@" >/tmp/dump 2>/tmp/dump.err; do
        code=$?
        tries=$((tries + 1))
        grep -q 'has a dump under way' /tmp/dump.err && [ $tries -lt 45 ] || return $code
        sleep 2
    done
}

# Killed while the task is frozen.
begin
echo "$agent" >/tmp/doomed
dump_through_agent
code=$?
cat /tmp/dump.err
check "the task was frozen when the agent was killed" test -e /tmp/doomed-frozen
check "the command fails, too" [ $code != 0 ]
check "no CRIU is left after that" within 60 eval '! pgrep -f /debian/bin/criu >/dev/null'
check "that process is unharmed, too" verify
start_agent
check "the agent is ready once more" on agent status --wait 60s

# Nothing was lost, and the next dump succeeds.
check "the dump before is listed still" eval 'lists a | grep -q full'
begin
check "the dump with pre-copy through the agent" dump_through_agent --durability all
cat /tmp/dump
check "that dump sent the last modified part" between "$(json_number pages_written </tmp/dump)" 1105 1400
check "that process is gone" within 60 gone
check "verify" on b verify
check "restore through the agent" on agent restore guest
check "the process that the agent restored is sound" verify
