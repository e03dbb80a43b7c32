start_process
check() { kill -0 "$PID"; }
