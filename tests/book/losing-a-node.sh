three_nodes
check() {
    permafrost --socket run-c/control.sock verify naps
    [ "$(permafrost --socket run-c/control.sock node ls | grep -c ' up ')" = 3 ]
}
