systemctl start permafrostd
