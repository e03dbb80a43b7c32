three_nodes
start_process
check() {
    [ -e images/inventory.img ]
    [ -s etcd.backup ]
}
