# A disk that returns EIO for one sector, in the middle of a checkpoint: the load from the mapping is a SIGBUS. It costs
# the checkpoint a page, and the daemon nothing.
. /scenarios/lib.sh
D=/mnt/disk
DATA=$D/permafrost
REGION=$DATA/region
exits() {
    expected=$1
    shift
    "$@"
    [ $? = "$expected" ]
}
mkdir -p $D
# By its path: busybox has one of that name. Nothing in the middle of the disk but the region.
check "a file system on the disk" /usr/sbin/mke2fs -q -F -t ext4 -b 4096 -m 0 -O ^has_journal /dev/vda
check "it is mounted" mount -t ext4 /dev/vda $D
check "permafrostd starts" start_permafrostd --region-size 100M --scrub-period off
start_workload --size-mib 64
check "dump" permafrost dump --pid "$PID" --job hurt
check "the workload is gone" within 10 gone
check "every page verifies while it is cached" permafrost verify
kill "$DAEMON"
check "permafrostd stops cleanly" wait "$DAEMON"

# What is read from now on comes from the disk.
sync
check "the page cache is dropped" umount $D
mount -t ext4 /dev/vda $D
check "the region has an unreadable sector" eval '! dd if=$REGION of=/dev/null bs=64k 2>/tmp/dd'
cat /tmp/dd
check "which is an I/O error" grep -q 'Input/output error\|I/O error' /tmp/dd
umount $D
mount -t ext4 /dev/vda $D

check "permafrostd starts again" start_permafrostd --scrub-period off --listen-metrics 127.0.0.1:9100
check "a clean shutdown is behind it" eval 'permafrost --json status | tr -d " \n" | grep -q "\"unsafe_shutdowns\":0"'
permafrost verify >/tmp/verify 2>&1
check "verify finds damage" [ $? = 7 ]
cat /tmp/verify
check "and names the checkpoint and an address" grep -q 'hurt@1.*address 0x' /tmp/verify
check "one page and no more" [ "$(grep -c 'address 0x' /tmp/verify)" = 1 ]
check "permafrostd lives" kill -0 "$DAEMON"
check "it says how many pages are lost" eval '[ "$(permafrost --json status | json_number lost_pages)" = 1 ]'
permafrost ls
check "scrub finds it, too" exits 7 permafrost scrub
check "a restore of it is refused" exits 7 permafrost restore hurt

# Reading fails, writing does not: the node goes on.
check "it is ready" eval 'wget -q -O - http://127.0.0.1:9100/readyz'
start_workload --size-mib 16
check "another dump" permafrost dump --pid "$PID" --job whole
check "its restore" permafrost restore whole
check "it is sound" verify
kill -9 "$PID"
check "its pages verify" permafrost verify whole
kill "$DAEMON"
check "permafrostd stops cleanly again" wait "$DAEMON"
check "without a daemon the region is read to its end, too" exits 7 permafrost region check $REGION
umount $D
