
# Behind the pages: the agent's unit on a node without storage, over a node of the playground.
place="the agent's unit"
must_be() { [ "$2" = "$3" ] || { echo "$1 is $2, and not $3"; false; }; }
# Waits until a condition holds, half a minute at most.
await() {
  for _ in $(seq 300); do
    eval "$1" && return
    sleep 0.1
  done
  echo "waited in vain for: $1"
  false
}
unset PERMAFROST_SOCKET
systemctl stop permafrostd
address=$(permafrost --socket playground/a/control.sock --json status | sed -n 's/.*"peers": "\([^"]*\)".*/\1/p')
permafrost pki issue --dir playground/ca --name compute --role agent --namespace default --out /etc/permafrost/agent
chown -R permafrost: /etc/permafrost/agent
echo "PERMAFROST_AGENT_OPTIONS=\"--identity /etc/permafrost/agent --node a=$address\"" >/etc/default/permafrost-agent
systemctl start permafrost-agent
permafrost status --wait 60s | grep 'permafrost agent'
pid() { systemctl show --value --property=MainPID permafrost-agent; }
status() { sed -n "s/^$1:[[:space:]]*//p" "/proc/$(pid)/status"; }
must_be "the agent's mode of seccomp" "$(status Seccomp)" 2
must_be "the agent's NoNewPrivs" "$(status NoNewPrivs)" 1
must_be "the agent's CapEff" "$(status CapEff)" 0000000000000002
for way in stream page-server; do
  sleep 1000 </dev/null >/dev/null 2>&1 & PID=$!; disown
  permafrost dump --pid $PID --job $way --shell-job --$way
  await "! kill -0 $PID 2>/dev/null"
  permafrost restore $way
  kill -0 $PID
  kill -9 $PID
done
before=$(pid)
systemctl kill --kill-whom=main --signal=KILL permafrost-agent
await '[ "$(pid)" != "$before" ] && [ "$(pid)" != 0 ]'
permafrost status --wait 60s | grep 'permafrost agent'
permafrost ls | grep stream
systemctl stop permafrost-agent
must_be "the result of the agent's service" "$(systemctl show --value --property=Result permafrost-agent)" success
log=$(journalctl --unit permafrost-agent --output cat --no-pager)
grep 'agent ready' <<<"$log"
if grep -E ' (WARN|ERROR) ' <<<"$log"; then echo "the agent has warned"; false; fi
