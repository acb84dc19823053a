# shellcheck shell=sh disable=SC2154,SC2086 # set by the suite; addresses hold nothing to be split
# The unit itself, taken from the kernel: `vtd:BDF`. All but the first in the machines of vm/vtd.

# leave BDF: no driver of the kernel's has it.
leave() { [ "$(driver_of $1)" = none ] || echo $1 >/sys/bus/pci/devices/$1/driver/unbind; }

# A machine whose kernel has the unit, and would let its registers be mapped (iomem=relaxed).
vtd_of_the_kernel_is_left_alone() {
    refused 'bound to the kernel driver nvme.*/unbind' pinfold nvme vtd:$nvme0 --i-own-this-machine
    leave $nvme0
    refused 'is enabled \(status 0xc.*: boot with intel_iommu=off intremap=off iomem=relaxed' pinfold nvme vtd:$nvme0 --i-own-this-machine
    echo $nvme0 >/sys/bus/pci/drivers/nvme/bind
    disk $nvme0 1 >/dev/null
}

vtd_only_on_request() {
    refused 'i-own-this-machine' pinfold nvme vtd:$nvme0
    refused 'bound to the kernel driver nvme.*/unbind' pinfold nvme vtd:$nvme0 --i-own-this-machine
    for bdf in $nvme0 $nvme1 $nvme2; do
        leave $bdf
        pinfold nvme vtd:$bdf --i-own-this-machine >/tmp/nvme
        has /tmp/nvme 'pinfold[012]'
    done
}

vtd_drivers_of_others() {
    leave $nvme0
    leave $sata
    /test/drivers_vtd $nvme0 $sata >/tmp/drivers 2>&1 || { cat /tmp/drivers; fail "a driver failed"; }
    note "$(tail -n 1 /tmp/drivers)"
}

# vtd_verifies TARGET PROTECT REQUESTS: at queue depth 1 and 64, half of the requests each.
vtd_verifies() {
    target=$1 protect=$2 requests=$(($3 / 2))
    for depth in 1 64; do
        pinfold io vtd:$target --i-own-this-machine --rw randrw --bsrange 512-1M --iodepth $depth --verify-requests $requests \
            --size 4M --protect $protect --verify --force >/tmp/io 2>/tmp/errors
        has /tmp/io '^Verified: '
        has /tmp/io "^domain vtd, protect $protect"
        if grep 'refused an access' /tmp/errors; then fail "the unit has refused an access"; fi
    done
    note "$(kind_of $target), $((2 * requests)) requests"
}

# An access of a device that is attached to nothing (QEMU's edu): the line that other tests must not find. QEMU records
# one access of a device until the record is freed.
vtd_reports_what_is_refused() {
    edu=/sys/bus/pci/devices/0000:00:12.0
    echo 1 >$edu/enable
    # Memory space and bus mastering.
    printf '\006' | dd of=$edu/config bs=1 seek=4 conv=notrunc 2>/dev/null
    bar=$(head -n 1 $edu/resource | cut -d ' ' -f 1)
    pinfold io vtd:$nvme0 --i-own-this-machine --rw read --runtime 1000 --time-based >/tmp/io 2>/tmp/errors &
    pid=$!
    until [ $(($(unit_status) >> 31)) = 1 ]; do
        kill -0 $pid 2>/dev/null || fail "exited early: $(cat /tmp/io /tmp/errors)"
        usleep 10000
    done
    # Reads 8 bytes: source, destination, count, command. It takes 100 ms.
    devmem $((bar + 0x80)) 32 0x5000
    devmem $((bar + 0x88)) 32 0x40000
    devmem $((bar + 0x90)) 32 8
    devmem $((bar + 0x98)) 32 1
    usleep 500000
    kill -TERM $pid
    code=0
    wait $pid || code=$?
    same "exit code" 130 $code
    has /tmp/errors 'refused an access.*00:12.0 was refused a read of the page at iova:0x5000'
    echo 0 >$edu/enable
}

vtd_is_one_programs() {
    pinfold io vtd:$nvme0 --i-own-this-machine --rw read --runtime 1000 --time-based >/tmp/io &
    pid=$!
    until grep -q "FLOCK .* $pid " /proc/locks; do
        kill -0 $pid 2>/dev/null || fail "exited early: $(cat /tmp/io)"
        usleep 10000
    done
    refused 'another process drives' pinfold nvme vtd:$nvme1 --i-own-this-machine
    kill -TERM $pid
    code=0
    wait $pid || code=$?
    same "exit code" 130 $code
    # Everything that it had enabled is disabled.
    pinfold nvme vtd:$nvme1 --i-own-this-machine >/tmp/nvme
    has /tmp/nvme 'pinfold1'
}

vtd_kernel_reads_pinfold_data() {
    dd if=/dev/urandom of=/tmp/a bs=1000 count=5001 2>/dev/null
    pinfold copy /tmp/a /tmp/b --via vtd:$nvme2/2 --force --i-own-this-machine
    cmp /tmp/a /tmp/b
    echo $nvme2 >/sys/bus/pci/drivers/nvme/bind
    node=$(disk $nvme2 2)
    head -c 5001000 $node | cmp /tmp/a -
}

# The kernel's own client, in a command whose end ends the server.
vtd_serves_a_disk() {
    nbd_disk || return 0
    leave $nvme0
    dd if=/dev/urandom of=/tmp/in bs=1M count=8 2>/dev/null
    cat >/tmp/client <<'END'
nbd-client -unix "$unixsocket" /dev/nbd0
dd if=/tmp/in of=/dev/nbd0 bs=1M seek=1 oflag=direct
dd if=/tmp/in of=/dev/nbd0 bs=4096 seek=32768 conv=fsync
echo 3 >/proc/sys/vm/drop_caches
dd if=/dev/nbd0 of=/tmp/out bs=1M skip=1 count=8 iflag=direct
cmp /tmp/in /tmp/out
nbd-client -d /dev/nbd0
END
    run pinfold serve vtd:$nvme0/1 --i-own-this-machine --buffers 16M --run 'sh -e /tmp/client'
    if grep 'refused an access' /tmp/ran; then fail "the unit has refused an access"; fi
    same "what the unit has enabled" 0 $(($(unit_status) & 0x84000000))
    # The kernel's NVMe driver finds the same on the disk.
    echo $nvme0 >/sys/bus/pci/drivers/nvme/bind
    node=$(disk $nvme0 1)
    dd if="$node" of=/tmp/out bs=1M skip=1 count=8 iflag=direct 2>/dev/null
    cmp /tmp/in /tmp/out
    dd if="$node" of=/tmp/out bs=4096 skip=32768 count=2048 iflag=direct 2>/dev/null
    cmp /tmp/in /tmp/out
    leave $nvme0
    note "$(grep requests /tmp/ran | tr -s ' ')"
}

# unit_status: prints the unit's global status register. QEMU's unit has its registers there.
unit_status() { devmem $((0xfed90000 + 0x1c)) 32; }

# A program that is killed cannot disable the unit. The next one does not take it over: its tables
# are in memory that the kernel has given back, and the device may go on. The machine is rebooted.
vtd_killed_needs_a_reboot() {
    # Neither translation nor the queue.
    same "what the unit has enabled" 0 $(($(unit_status) & 0x84000000))
    leave $nvme0
    pinfold io vtd:$nvme0 --i-own-this-machine --rw randrw --bs 64k --iodepth 32 --runtime 1000 --time-based --force >/tmp/io 2>&1 &
    pid=$!
    # Translation is enabled (bit 31), and half of a second later commands are in flight.
    until [ $(($(unit_status) >> 31)) = 1 ]; do
        kill -0 $pid 2>/dev/null || fail "exited early: $(cat /tmp/io)"
        usleep 10000
    done
    usleep 500000
    kill -9 $pid
    if wait $pid; then code=0; else code=$?; fi
    same "exit code" 137 $code
    status=$(unit_status)
    [ $((status >> 31)) = 1 ] || fail "a program that was killed has disabled the unit"
    # For its own device, and for another one.
    for bdf in $nvme0 $nvme1; do
        leave $bdf
        refused "at 0xfed90000 is enabled .*after a program that was killed while it drove the unit, reboot" \
            pinfold nvme vtd:$bdf --i-own-this-machine
    done
    same "the unit, as it was" $status "$(unit_status)"
}
