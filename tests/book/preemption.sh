systemctl start permafrostd
start_process
OTHER=$PID
start_process
