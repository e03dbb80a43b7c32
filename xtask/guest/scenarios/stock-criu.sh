# The ground everything else stands on, with nothing of ours but the workload: the NVDIMM is DAX, and CRIU
# dumps incrementally into its own page server and restores.
. /scenarios/lib.sh
D=/mnt/pmem0/stock
check "the NVDIMM is mounted with DAX" grep -q '^/dev/pmem0 .*dax=always' /proc/mounts
check "criu check" criu check
criu --version
mkdir -p $D/1 $D/2 /tmp/l1 /tmp/l2
start_workload --size-mib 64
check "page server" criu page-server -D $D/1 --address 127.0.0.1 --port 1234 -d
check "pre-dump" criu pre-dump -t "$PID" -D /tmp/l1 --track-mem --page-server --address 127.0.0.1 --port 1234
check "modify" modify
ln -s ../1 $D/2/parent
check "page server with a parent" criu page-server -D $D/2 --prev-images-dir ../1 --address 127.0.0.1 --port 1235 -d
check "incremental dump" criu dump -t "$PID" -D /tmp/l2 --prev-images-dir ../l1 --track-mem \
    --page-server --address 127.0.0.1 --port 1235
check "the workload is gone" within 10 gone
cp -n /tmp/l2/*.img $D/2/
check "full and incremental page counts" eval \
    'between $(($(stat -c %s '$D'/1/pages-65537.img) / 4096)) 16384 16700 &&
     between $(($(stat -c %s '$D'/2/pages-65537.img) / 4096)) 1638 1900'
check "restore" criu restore -D $D/2 -d
check "the restored workload is sound" verify
