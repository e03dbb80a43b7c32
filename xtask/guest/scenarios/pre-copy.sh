# Pre-copy with the real CRIU and real soft-dirty bits: rounds while the process modifies its memory, the freeze, and
# what is left when the command or the daemon is killed in a round.
. /scenarios/lib.sh
DATA=/mnt/pmem0/permafrost
check "permafrostd starts" start_permafrostd --region-size 400M
export PERMAFROST_CRIU=/tmp/criu

# A CRIU after whose pre-dumps the process has modified a tenth of its memory. With /tmp/hold, the second pre-dump waits
# before it begins.
cat >$PERMAFROST_CRIU <<'CRIU'
#!/bin/sh
. /scenarios/lib.sh
PID=$(cat /tmp/pid)
[ "$1" = pre-dump ] || exec criu "$@"
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
lists_nothing() { permafrost --json ls | tr -d ' \n' | grep -q '"checkpoints":\[\]'; }
lists() { permafrost --json ls | tr -d ' \n' | grep -o '"kind":"[a-z-]*"' | tr '\n' ' '; }

start_workload --size-mib 64 --modify-percent 10
echo "$PID" >/tmp/pid

# The command is killed in the second round: CRIU has no page server any more.
: >/tmp/hold
permafrost dump --pid "$PID" --job killed --pre-copy >/tmp/killed.out 2>&1 &
COMMAND=$!
check "a second round begins" within 120 test -e /tmp/held
check "the first is listed as a round" eval '[ "$(lists)" = "\"kind\":\"pre-copy\" " ]'
kill -9 $COMMAND
check "a killed command's rounds are removed" within 60 lists_nothing
rm -f /tmp/hold
check "its process is unharmed" verify
check "no CRIU is left" within 60 eval '! pidof criu loader >/dev/null'

# The daemon is killed in the second round.
rm -f /tmp/rounds /tmp/held
: >/tmp/hold
permafrost dump --pid "$PID" --job killed --pre-copy >/tmp/killed.out 2>&1 &
COMMAND=$!
check "another second round begins" within 120 test -e /tmp/held
kill -9 "$DAEMON"
rm -f /tmp/hold
wait $COMMAND
code=$?
cat /tmp/killed.out
check "the command fails without its daemon" [ $code != 0 ]
check "that process is unharmed, too" verify
check "permafrostd starts again" start_permafrostd
check "rounds of a killed daemon are removed" within 60 lists_nothing

# Rounds until the modified tenth stops shrinking.
rm -f /tmp/rounds
check "dump with pre-copy" eval 'permafrost --json dump --pid "$PID" --job guest --pre-copy >/tmp/dump'
cat /tmp/dump
check "it has two rounds" [ "$(cat /tmp/rounds)" = 2 ]
check "the modified set stopped shrinking" eval 'json_has ended not-shrinking </tmp/dump'
check "the dump sent the last modified tenth" between "$(json_number pages_written </tmp/dump)" 1638 1900
check "the process is gone" within 60 gone
check "only the dump is left" [ "$(lists)" = '"kind":"full" ' ]
check "verify" permafrost verify
check "restore" permafrost restore guest
check "the restored process is sound" verify
kill -9 "$PID"
check "its pid is free again" within 10 gone

# A twentieth modified each second; the figures are for people: an emulated machine has no speed to check.
export PERMAFROST_CRIU=/usr/sbin/criu
check "room for the next" permafrost rm guest --all
start_workload --size-mib 96 --modify-percent 5
frozen() { json_number frozen_time <"$1"; }
modify_each_second() { while kill -USR1 "$PID" 2>/dev/null; do sleep 1; done; }
modify_each_second &
MODIFIES=$!
check "plain dump" eval 'permafrost --json dump --pid "$PID" --job figures --full --leave-running >/tmp/plain'
check "room for the one after it" permafrost rm figures --all
check "dump of a process that is modified" eval 'permafrost --json dump --pid "$PID" --job figures --full --pre-copy >/tmp/copied'
kill $MODIFIES
cat /tmp/plain /tmp/copied
echo "FIGURES frozen: plain $(frozen /tmp/plain) us, after pre-copy $(frozen /tmp/copied) us, $(json_number pages_written </tmp/copied) of $(json_number pages_written </tmp/plain) pages"
check "restore of the process that was modified" permafrost restore figures
check "it is sound" verify
