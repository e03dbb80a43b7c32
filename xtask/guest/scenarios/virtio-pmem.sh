# A device whose file system is DAX and refuses MAP_SYNC: permafrostd must not take it for more than it is.
. /scenarios/lib.sh
check "the device is mounted with DAX" grep -q '^/dev/pmem0 .*dax=always' /proc/mounts
DATA=/mnt/pmem0/permafrost
check "--require-dax is refused" eval '! start_permafrostd --require-dax --region-size 400M'
check "and the errno said" grep -q 'EOPNOTSUPP\|(95)\|errno 95\|os error 95\| 95' /tmp/permafrostd.err
check "without it permafrostd starts" start_permafrostd --region-size 400M
permafrost --json status >/tmp/status; cat /tmp/status
check "its region is a file" eval 'json_has medium file </tmp/status'
check "and says why" eval 'json_has guarantee ".*95" </tmp/status'
start_workload --size-mib 16
check "dump" permafrost dump --pid "$PID" --job guest
check "the workload is gone" within 10 gone
check "restore" permafrost restore guest
check "the restored workload is sound" verify
