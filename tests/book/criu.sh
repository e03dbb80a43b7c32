PLUGIN=$SCRATCH/bin/criu-plugins
systemctl start permafrostd
start_process
check() { kill -0 "$PID"; }
