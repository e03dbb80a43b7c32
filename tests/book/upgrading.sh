three_nodes
check() {
    permafrost --socket run-b/control.sock verify naps
    permafrost --socket run-c/control.sock node level | grep 'version 2 is used'
}
