# Starts systemd in a clean Debian, as the first process of namespaces of its own. Arguments: the Debian's root, and the
# directory that has CRIU, which is mounted at its own path: CRIU is started where it lies.
set -eu
# What the caller has left open is not in the root that the task is restored in.
for fd in $(ls /proc/self/fd); do
  case $fd in 0 | 1 | 2 | 255) ;; *) eval "exec $fd>&-" ;; esac
done
root=$1 target=$2
mount --make-rprivate /
mount --bind "$root" "$root"
mkdir "$root/packages/old"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
for directory in run tmp; do mount -t tmpfs tmpfs "$root/$directory"; done
mkdir -p "$root$target"
mount --bind "$target" "$root$target"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0; do
  IFS=: read -r name major minor <<<"$device"
  mknod -m 666 "$root/dev/$name" c "$major" "$minor"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mount -t tmpfs tmpfs "$root/dev/shm"
cd "$root"
pivot_root . packages/old
umount -l /packages/old
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=check /lib/systemd/systemd --unit=check.service </dev/null
