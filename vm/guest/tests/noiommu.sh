# shellcheck shell=sh disable=SC2154,SC2086 # set by the suite; addresses hold nothing to be split
# A machine whose IOMMU is off, with a kernel that allows VFIO without one.

noiommu_only_on_request() {
    same "groups" 0 "$(find /sys/kernel/iommu_groups -mindepth 1 -maxdepth 1 | wc -l)"
    refused 'enable_unsafe_noiommu_mode|no IOMMU' pinfold bind $nvme0
    same "driver" nvme "$(driver_of $nvme0)"
    echo Y >/sys/module/vfio/parameters/enable_unsafe_noiommu_mode
    pinfold bind $nvme0
    refused 'IOMMU' pinfold io vfio:$nvme0 --rw read --size 1M
    before=$(free_hugepages)
    # Checks that each page is present and cannot move before its address is passed to the device;
    # prints the error for others.
    vfio_check $nvme0 noiommu
    /test/unprotected $nvme0 >/tmp/unprotected 2>&1 || { cat /tmp/unprotected; fail "the controller did not move its data"; }
    same "free hugepages" "$before" "$(free_hugepages)"
    pinfold unbind $nvme0
    node=$(disk $nvme0 1)
    # The kernel's driver reads the data: the byte at 0x12345 is 0x45 ^ 0x23 ^ 0x01.
    same "the byte that the kernel reads" 67 "$(dd if="$node" bs=1 skip=$((0x12345)) count=1 2>/dev/null | od -An -tx1 | tr -d ' ')"
    note "$(tail -n 1 /tmp/unprotected)"
}
