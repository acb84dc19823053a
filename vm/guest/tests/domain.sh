# shellcheck shell=sh disable=SC2154,SC2086 # set by the suite; addresses hold nothing to be split
# Domains whose table the kernel keeps: type1 and, if the kernel has it, iommufd.

interfaces() { if [ -c /dev/iommu ]; then echo type1 iommufd; else echo type1; fi; }

domain_guarantees() {
    bind_to_vfio $nvme0
    bind_to_vfio $nvme1
    for interface in $(interfaces); do vfio_check $nvme0 $interface with=$nvme1; done
    note "by $(interfaces)"
}

domain_reports_the_entry_limit() {
    bind_to_vfio $nvme0
    parameter=/sys/module/vfio_iommu_type1/parameters/dma_entry_limit
    kept=$(cat $parameter)
    echo 16 >$parameter
    if vfio_check $nvme0 type1 entries; then code=0; else code=$?; fi
    echo "$kept" >$parameter
    return $code
}

domain_reports_memlock() {
    bind_to_vfio $nvme0
    chmod 666 /dev/vfio/vfio
    for node in /dev/vfio/$(group_of $nvme0) /dev/vfio/devices/* /dev/iommu; do
        [ ! -c "$node" ] || chown 1000:1000 "$node"
    done
    for interface in $(interfaces); do as_user 8192 vfio_check $nvme0 $interface memlock; done
}

domain_is_charged_as_forecast() {
    bind_to_vfio $nvme0
    for interface in $(interfaces); do vfio_check $nvme0 $interface charge; done
    note "by $(interfaces)"
}

domain_is_measured() {
    bind_to_vfio $nvme0
    pinfold-bench vfio --quick --json >/tmp/bench
    for subject in pages-4k pages-2m whole; do
        has /tmp/bench "\"case\":\"map-4k\",\"subject\":\"$subject\""
    done
    note "$(sed -n 's/.*"case":"\(map-[48][km]\)","subject":"\([^"]*\)".*"median":\([0-9]*\).*/\1 \2 \3 ns/p' /tmp/bench | tr '\n' ',')"
}

# fio is not in the machine: a stand-in reads its disk, which shows that the kernel's driver has it
# at that moment.
iops_are_measured_interleaved() {
    bind_to_vfio $nvme0
    pinfold-bench vfio --quick --json --runs 1 >/tmp/bench 2>/tmp/left-out
    has /tmp/left-out 'left out: no fio on PATH'
    mkdir -p /tmp/stand-in
    cat >/tmp/stand-in/fio <<'END'
#!/bin/sh
for word in "$@"; do case $word in --filename=*) node=${word#*=} ;; esac; done
dd if="$node" of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null || exit 1
echo "$@" >>/tmp/stand-in/words
echo '{"jobs":[{"read":{"iops":1000.5}}]}'
END
    chmod +x /tmp/stand-in/fio
    rm -f /tmp/stand-in/words
    PATH=/tmp/stand-in:$PATH pinfold-bench vfio --quick --json --runs 1 >/tmp/bench
    for subject in fio fio-batched static static-polled batch strict; do
        has /tmp/bench "\"case\":\"randread-4k-64\",\"subject\":\"$subject\",\"metric\":\"rate\""
    done
    has /tmp/bench '"subject":"fio",.*"median":1000.5'
    same "runs of fio" 4 "$(wc -l </tmp/stand-in/words)"
    has /tmp/stand-in/words '--readonly.*--filename=/dev/nvme.*--iodepth=64'
    same "driver afterwards" vfio-pci "$(driver_of $nvme0)"
    # A fio that fails is an error, and the controller is bound to VFIO again nevertheless.
    printf '#!/bin/sh\necho "the last words" >&2\nexit 3\n' >/tmp/stand-in/fio
    PATH=/tmp/stand-in:$PATH refused 'the last words' pinfold-bench vfio --quick --runs 1
    same "driver afterwards" vfio-pci "$(driver_of $nvme0)"
}
