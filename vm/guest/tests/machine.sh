# shellcheck shell=sh disable=SC2154,SC2086 # set by the suite; addresses hold nothing to be split
# The machine itself: prerequisites of all other tests.

machine_has_vfio() {
    [ -c /dev/vfio/vfio ] || [ -c /dev/iommu ] || fail "neither /dev/vfio/vfio nor /dev/iommu"
    note "$(uname -r)$([ ! -c /dev/vfio/vfio ] || echo ', /dev/vfio/vfio')$([ ! -c /dev/iommu ] || echo ', /dev/iommu')"
}

machine_isolates_each_disk() {
    for bdf in $nvme0 $nvme1 $nvme2 $vblk; do
        group=$(basename "$(readlink "/sys/bus/pci/devices/$bdf/iommu_group")")
        same "devices in group $group" "$bdf" "$(ls "/sys/kernel/iommu_groups/$group/devices")"
        # Translated, not passed through: else a wrong address would reach memory.
        has "/sys/kernel/iommu_groups/$group/type" '^DMA'
    done
}

machine_disks_have_their_parameters() {
    for line in "$nvme0 1 512 512" "$nvme1 1 4096 16" "$nvme2 1 512 any" "$nvme2 2 4096 any"; do
        # shellcheck disable=SC2086 # four words
        set -- $line
        node=$(disk "$1" "$2")
        queue=/sys/block/${node#/dev/}/queue
        same "$node block" "$3" "$(cat "$queue/logical_block_size")"
        [ "$4" = any ] || [ "$(cat "$queue/max_hw_sectors_kb")" -le "$4" ] || fail "$node: MDTS is not $4 KiB"
    done
}

machine_disks_store_data() {
    for line in "$nvme0 1" "$nvme1 1" "$nvme2 1" "$nvme2 2"; do
        # shellcheck disable=SC2086 # two words
        node=$(disk $line)
        dd if=/dev/urandom of=/tmp/sample bs=1M count=2 2>/dev/null
        dd if=/tmp/sample of="$node" bs=1M oflag=direct 2>/dev/null
        same "$node" "$(sha256sum </tmp/sample)" "$(dd if="$node" bs=1M count=2 iflag=direct 2>/dev/null | sha256sum)"
    done
}
