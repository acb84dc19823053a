# shellcheck shell=sh disable=SC2154,SC2086 # set by the suite; addresses hold nothing to be split
# `pinfold serve`, used by the kernel's own client.

# nbd_disk: whether this kernel can use one; the small kernel of vm/kernel-iommufd cannot.
nbd_disk() {
    [ -b /dev/nbd0 ] && return
    note "skipped: this kernel has no nbd"
    return 1
}

# wait_for_socket FILE PROCESS: waits for a socket while the program that makes it runs.
wait_for_socket() {
    while [ ! -S "$1" ]; do
        kill -0 "$2" 2>/dev/null || { cat /tmp/serve; fail "the server has ended"; }
        sleep 0.1
    done
}

# nbd_connect: serves the first disk, and makes /dev/nbd0 of it; sets `server`.
nbd_connect() {
    bind_to_vfio $nvme0
    pinfold serve vfio:$nvme0/1 --nbd unix:/tmp/nbd.socket --buffers 16M >/tmp/serve 2>&1 &
    server=$!
    wait_for_socket /tmp/nbd.socket $server
    nbd-client -unix /tmp/nbd.socket /dev/nbd0 >/tmp/client 2>&1 || { cat /tmp/client /tmp/serve; fail "nbd-client"; }
}

nbd_disconnect() {
    nbd-client -d /dev/nbd0 >/tmp/client 2>&1 || { cat /tmp/client; fail "nbd-client -d"; }
    kill -TERM $server
    wait $server || { cat /tmp/serve; fail "the server's exit code is $?"; }
}

nbd_kernel_uses_a_controller() {
    nbd_disk || return 0
    before=$(faults)
    free=$(free_hugepages)
    nbd_connect
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

    nbd_disconnect
    same "free hugepages afterwards" "$free" "$(free_hugepages)"
    same "IOMMU faults" "$before" "$(faults)"

    # The kernel's NVMe driver finds the same on the disk.
    pinfold unbind $nvme0
    dd if="$(disk $nvme0 1)" of=/tmp/out bs=1M skip=1 count=8 iflag=direct 2>/dev/null
    cmp /tmp/in /tmp/out
    note "$(grep requests /tmp/serve | tr -s ' ')"
}

# run WORDS: a command whose output matters only if it fails.
run() {
    "$@" >/tmp/ran 2>&1 || {
        code=$?
        cat /tmp/ran
        fail "$* ended with $code"
    }
}

# A file system that is made, written, trimmed and checked over nbd is the same on the disk itself.
nbd_stores_a_file_system() {
    nbd_disk || return 0
    grep -qw ext4 /proc/filesystems || fail "this kernel has nbd, but no ext4"
    ln -sf /proc/self/mounts /etc/mtab
    before=$(faults)
    nbd_connect
    # By its path: busybox's shell prefers its own mke2fs.
    run /bin/mke2fs -q -F -t ext4 /dev/nbd0
    mkdir -p /tmp/disk
    mount -t ext4 -o discard /dev/nbd0 /tmp/disk
    dd if=/dev/urandom of=/tmp/disk/large bs=1M count=24 2>/dev/null
    dd if=/dev/urandom of=/tmp/disk/deleted bs=1M count=8 2>/dev/null
    mkdir /tmp/disk/many
    for number in $(seq 300); do echo "file $number" >/tmp/disk/many/$number; done
    sync
    rm /tmp/disk/deleted
    (cd /tmp/disk && find . -type f -exec sha256sum {} +) | sort >/tmp/sums
    same "files" 301 "$(wc -l </tmp/sums)"
    umount /tmp/disk
    run /bin/e2fsck -f -n /dev/nbd0
    echo 3 >/proc/sys/vm/drop_caches
    mount -t ext4 -o ro /dev/nbd0 /tmp/disk
    (cd /tmp/disk && sha256sum -c /tmp/sums) >/tmp/ran 2>&1 || { grep -v OK /tmp/ran; fail "files differ over nbd"; }
    umount /tmp/disk
    nbd_disconnect
    has /tmp/serve '^ *trims +[1-9]'
    same "IOMMU faults" "$before" "$(faults)"

    pinfold unbind $nvme0
    disk=$(disk $nvme0 1)
    run /bin/e2fsck -f -n "$disk"
    mount -t ext4 -o ro "$disk" /tmp/disk
    (cd /tmp/disk && sha256sum -c /tmp/sums) >/tmp/ran 2>&1 || { grep -v OK /tmp/ran; fail "files differ on the disk"; }
    umount /tmp/disk
    # The next steps expect a disk without a file system.
    dd if=/dev/zero of="$disk" bs=1M count=1 oflag=direct 2>/dev/null
    note "$(grep requests /tmp/serve | tr -s ' '), $(grep trims /tmp/serve | tr -s ' ')"
}
