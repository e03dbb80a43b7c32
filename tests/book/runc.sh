systemctl start permafrostd
mkdir -p B/rootfs/{bin,proc,dev,sys} W
cp "$(readlink -f "$SCRATCH/bin/busybox")" B/rootfs/bin/busybox
ln -s busybox B/rootfs/bin/sh
# A container keeps its standard streams, and CRIU cannot dump files of another mount namespace.
runc() { command runc "$@" >/dev/null 2>&1; }
command runc spec --bundle B
sed -i 's/"terminal": true/"terminal": false/; s/"readonly": true/"readonly": false/' B/config.json
sed -i '/^\t\t\t{$/{N;/"network"/{N;d}}' B/config.json
sed -i 's|^\t\t\t"sh"$|\t\t\t"sh", "-c", "i=0; while :; do i=$((i+1)); echo $i >/count; /bin/busybox sleep 0.05; done"|' B/config.json
runc run --detach --bundle B web
check() { command runc delete --force web; }
