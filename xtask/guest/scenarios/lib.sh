# What scenarios share. They run under busybox.

# A line for the host: each check passes or fails by name.
tell() { echo "$*" >/dev/ttyS1; echo "$(cut -d' ' -f1 /proc/uptime) $*"; }
pass() { tell "PASS $*"; }
# A failed check ends the scenario, as later ones build on earlier ones.
fail() { tell "FAIL $*"; exit 1; }

# check NAME COMMAND…: passes when the command does.
check() {
    name=$1
    shift
    if "$@"; then pass "$name"; else fail "$name: \`$*\` gives $?"; fi
}

# within SECONDS COMMAND…: tries until it succeeds.
within() {
    tries=$(($1 * 10))
    shift
    while ! "$@" 2>/dev/null; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || return 1
        sleep 0.1
    done
}

between() { [ -n "$1" ] && [ "$1" -ge "$2" ] && [ "$1" -le "$3" ]; }

# Numbers and words out of JSON, whose spaces and line breaks say nothing: the first of that name.
json_number() { tr -d ' \n' | sed -n "s/^.*\"$1\":\([0-9]*\).*\$/\1/p"; }
json_has() { tr -d ' \n' | grep -q "\"$1\":\"$2"; }

W=/run/workload

# start_workload ARGUMENTS…: sets PID. An orphan from the start, so that the first process collects it
# when a dump has killed it. Its pid is one that nothing has after another boot either.
start_workload() {
    mkdir -p $W
    rm -f $W/workload.status
    echo 20000 >/proc/sys/kernel/ns_last_pid
    (setsid permafrost-workload --dir $W "$@" </dev/null >/dev/null 2>&1 &)
    within 60 test -s $W/workload.status || fail "workload: does not start"
    PID=$(json_number pid <$W/workload.status)
}

# ask SIGNAL: has the workload do something and report.
ask() {
    rm -f $W/workload.status
    kill -"$1" "$PID" && within 60 test -s $W/workload.status
}

modify() { ask USR1; }

verify() {
    ask USR2 || return 1
    cat $W/workload.status; echo
    json_has faults '' <$W/workload.status && return 1
    [ "$(json_number bad_pages <$W/workload.status)" = 0 ]
}

gone() { ! test -e "/proc/$PID"; }

# start_permafrostd ARGUMENTS…: sets DAEMON.
start_permafrostd() {
    # The last one's: the new one's shell empties it, but not necessarily before it is looked at.
    rm -f /tmp/permafrostd.out
    permafrostd --data-dir "$DATA" --run-dir /run/permafrost --listen 127.0.0.1:7117 "$@" \
        >/tmp/permafrostd.out 2>/tmp/permafrostd.err &
    DAEMON=$!
    within 30 grep -q 'permafrostd ready' /tmp/permafrostd.out && return 0
    cat /tmp/permafrostd.out /tmp/permafrostd.err
    return 1
}
