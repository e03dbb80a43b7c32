# Runs under systemd, which has started permafrostd.service: dumps and restores a real process in each way, and does to
# the service what an operator does to it. CRIU is CRIU's path. The last line is the summary.
set -eu
export PERMAFROST_CRIU=$CRIU
trap 'test $? = 0 || journalctl --unit permafrostd --no-pager --lines 30' EXIT
fail() { echo "$1"; exit 1; }
must_be() { test "$2" = "$3" || fail "$1 is $2, and not $3"; }
property() { systemctl show --value --property="$1" permafrostd; }
daemon() { property MainPID; }
# A field of the daemon's status in /proc.
status() { sed -n "s/^$1:[[:space:]]*//p" "/proc/$(daemon)/status"; }

systemctl is-active --quiet permafrostd || fail "permafrostd does not run"
must_be "the mode of seccomp" "$(status Seccomp)" 2
must_be NoNewPrivs "$(status NoNewPrivs)" 1
# CAP_DAC_OVERRIDE alone.
must_be CapEff "$(status CapEff)" 0000000000000002
must_be "the owner of the region" "$(stat -c %U /var/lib/permafrost/region)" permafrost
nsenter --target "$(daemon)" --mount sh -c 'touch /usr/writable' 2>/dev/null && fail "the daemon can write to /usr"

setsid sh -c 'echo $$ >/run/pid; i=0; while :; do i=$((i+1)); echo $i >>/run/count; sleep 0.05; done' \
  </dev/null >/dev/null 2>&1 &
while [ ! -s /run/count ]; do sleep 0.05; done
task=$(cat /run/pid)
# Returns when the task is gone: its parent may take a moment to notice.
ended() {
  for _ in $(seq 100); do
    kill -0 "$task" 2>/dev/null || return 0
    sleep 0.1
  done
  fail "the task runs on after its dump as $1"
}
# Restores what was dumped last, and waits until it counts on.
restore() {
  ended "$1"
  frozen=$(tail -n 1 /run/count)
  permafrost restore "$1"
  sleep 1
  kill -0 "$task"
  now=$(tail -n 1 /run/count)
  test "$now" -gt "$frozen" || fail "the task does not count on after its restore from $1"
  done="$done; $1: dumped at $frozen, counted on to $now"
}
done=
mkdir /run/plugin /run/hook
permafrost dump --pid "$task" --job command
restore command
permafrost dump --pid "$task" --job stream --stream
restore stream
PERMAFROST_JOB=plugin "$PERMAFROST_CRIU" dump --no-default-config --tree "$task" --images-dir /run/plugin \
  -L /usr/lib/permafrost/criu
restore plugin
PERMAFROST_JOB=hook "$PERMAFROST_CRIU" dump --tree "$task" --images-dir /run/hook
restore hook
permafrost verify >/dev/null

before=$(daemon)
systemctl reload permafrostd
echo 'no-such-option = 1' >>/etc/permafrost/permafrostd.toml
systemctl reload permafrostd 2>/dev/null && fail "a wrong configuration was loaded"
sed -i '$d' /etc/permafrost/permafrostd.toml
must_be "the daemon after both reloads" "$(daemon)" "$before"

permafrost dump --pid "$task" --job killed
systemctl kill --kill-whom=main --signal=KILL permafrostd
permafrost status --wait 60s >/dev/null
must_be "the number of restarts" "$(property NRestarts)" 1
restore killed
permafrost dump --pid "$task" --job restarted
systemctl restart permafrostd
permafrost status --wait 60s >/dev/null
restore restarted

# The next release: the same files under another version. The daemon is restarted, and has what it had.
newer=/packages/newer
mkdir "$newer"
for package in /packages/*.deb; do
  dpkg-deb --raw-extract "$package" "$newer/tree"
  sed -i '/^Version:/s/$/+next/; /^Depends:/s/(= \([^)]*\))/(= \1+next)/' "$newer/tree/DEBIAN/control"
  dpkg-deb --build -Znone "$newer/tree" "$newer" >/dev/null
  rm -r "$newer/tree"
done
permafrost dump --pid "$task" --job upgraded
before=$(daemon)
dpkg --install "$newer"/*.deb >/dev/null
must_be "the version after an upgrade" "$(dpkg-query --show --showformat '${Version}' permafrostd | sed 's/.*+//')" next
test "$(daemon)" != "$before" || fail "the daemon of before runs on after an upgrade"
permafrost status --wait 60s >/dev/null
restore upgraded

kill -9 "$task"
systemctl stop permafrostd
must_be "the result of the service" "$(property Result)" success
test ! -e /run/permafrost || fail "the sockets are left"
log=$(journalctl --unit permafrostd --output cat --no-pager)
grep -q 'permafrostd ready' <<<"$log" || fail "the journal has no line of permafrostd"
if grep -E ' (WARN|ERROR) ' <<<"$log"; then fail "permafrostd has warned"; fi
echo "${done#; }"
