# shellcheck shell=sh disable=SC2154
# Third-party drivers of the crate dma-api on Pinfold's memory, through VFIO.

# The kernel's driver compares.
nvme_driver_on_pinfold() {
    for bdf in "$nvme0" "$nvme1"; do
        bind_to_vfio "$bdf"
        /test/nvme_driver_vfio "$bdf" /tmp/expected >/tmp/driver
        has /tmp/driver '4194304 bytes written and read back; 0 IOMMU entries afterwards'
        # Without being stopped, it leaves an enabled controller; the next user resets it.
        /test/nvme_driver_vfio "$bdf" --drop >/tmp/driver
        has /tmp/driver '; 0 IOMMU entries afterwards'
        bind_to_kernel "$bdf"
        dd if="$(disk "$bdf" 1)" of=/tmp/after bs=1M count=4 iflag=direct 2>/dev/null
        cmp /tmp/expected /tmp/after
    done
    note "$(grep 'requests of up to' /tmp/driver)"
}

ahci_driver_on_pinfold() {
    free=$(free_hugepages)
    bind_to_vfio "$sata"
    for _ in 1 2; do
        /test/ahci_driver_vfio "$sata" >/tmp/driver
        has /tmp/driver '4194304 bytes written and read back; 0 IOMMU entries afterwards'
        same "free hugepages afterwards" "$free" "$(free_hugepages)"
    done
    note "$(grep 'requests of up to' /tmp/driver)"
}
