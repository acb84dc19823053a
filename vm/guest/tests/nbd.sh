# shellcheck shell=sh disable=SC2154,SC2086 # set by the suite; addresses hold nothing to be split
# `pinfold serve`, used by the kernel's own client.

# wait_for_socket FILE PROCESS: waits for a socket while the program that makes it runs.
wait_for_socket() {
    while [ ! -S "$1" ]; do
        kill -0 "$2" 2>/dev/null || { cat /tmp/serve; fail "the server has ended"; }
        sleep 0.1
    done
}

nbd_kernel_uses_a_controller() {
    # The small kernel of vm/kernel-iommufd has no nbd.
    if [ ! -b /dev/nbd0 ]; then
        note "skipped: this kernel has no nbd"
        return
    fi
    bind_to_vfio $nvme0
    before=$(faults)
    free=$(free_hugepages)
    pinfold serve vfio:$nvme0/1 --nbd unix:/tmp/nbd.socket --buffers 16M >/tmp/serve 2>&1 &
    server=$!
    wait_for_socket /tmp/nbd.socket $server
    nbd-client -unix /tmp/nbd.socket /dev/nbd0 >/tmp/client 2>&1 || { cat /tmp/client /tmp/serve; fail "nbd-client"; }
    same "sectors of the disk" $((256 << 11)) "$(cat /sys/block/nbd0/size)"

    # Directly, and through the page cache: the latter ends with a flush.
    dd if=/dev/urandom of=/tmp/in bs=1M count=8 2>/dev/null
    dd if=/tmp/in of=/dev/nbd0 bs=1M seek=1 oflag=direct 2>/dev/null
    dd if=/tmp/in of=/dev/nbd0 bs=4096 seek=32768 conv=fsync 2>/dev/null
    echo 3 >/proc/sys/vm/drop_caches
    dd if=/dev/nbd0 of=/tmp/out bs=1M skip=1 count=8 iflag=direct 2>/dev/null
    cmp /tmp/in /tmp/out
    dd if=/dev/nbd0 of=/tmp/out bs=4096 skip=32768 count=2048 2>/dev/null
    cmp /tmp/in /tmp/out

    nbd-client -d /dev/nbd0 >/tmp/client 2>&1 || { cat /tmp/client; fail "nbd-client -d"; }
    kill -TERM $server
    wait $server || { cat /tmp/serve; fail "the server's exit code is $?"; }
    same "free hugepages afterwards" "$free" "$(free_hugepages)"
    same "IOMMU faults" "$before" "$(faults)"

    # The kernel's NVMe driver finds the same on the disk.
    pinfold unbind $nvme0
    dd if="$(disk $nvme0 1)" of=/tmp/out bs=1M skip=1 count=8 iflag=direct 2>/dev/null
    cmp /tmp/in /tmp/out
    note "$(grep requests /tmp/serve | tr -s ' ')"
}
