/* A stand-in for NVIDIA's management library (libnvidia-ml.so.1) and CUDA driver library (libcuda.so.1), for simulated GPU hosts.
 *
 * It answers NVIDIA's own nvidia-smi from a plain text file that `provision sandbox` writes: lines of `GPU KEY VALUE`, where GPU is an
 * index, or `-` for the host. What the file does not state is "not supported", as with GPUs that lack it. There is no GPU: CUDA finds none.
 * Layouts and numbers: NVIDIA's nvml.h of CUDA 12.4. Build: cc -std=c99 -fPIC -shared -Wl,-soname,libnvidia-ml.so.1
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STATE "/usr/lib/provision-sandbox/gpus.txt"
#define MAX_LINES 20000
#define MAX_GPUS 64
#define MAX_INSTANCES 8
#define MAX_HANDLES (MAX_GPUS * (1 + MAX_INSTANCES)) /* of all GPUs, of the first MIG instance of each, of the second … */

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { HOST = -1, WHOLE = -1 };

typedef struct Gpu { int index, instance; } Gpu; /* WHOLE, or the number of a MIG instance */
typedef struct { int gpu; char *key, *value; } Line;

static Line lines[MAX_LINES];
static int line_count, gpu_count;
static Gpu gpus[MAX_HANDLES];

static void load(void) {
    const char *path = getenv("PROVISION_SIMULATED_GPUS");
    FILE *file = fopen(path ? path : STATE, "r");
    char text[1024];
    line_count = gpu_count = 0;
    while (file && line_count < MAX_LINES && fgets(text, sizeof text, file)) {
        char *gpu = strtok(text, " "), *key = strtok(NULL, " \n"), *value = strtok(NULL, "\n");
        if (!gpu || !key || !value) continue;
        char *copy = malloc(strlen(key) + strlen(value) + 2);
        if (!copy) break;
        Line *line = &lines[line_count++];
        line->gpu = *gpu == '-' ? HOST : atoi(gpu);
        line->key = strcpy(copy, key);
        line->value = strcpy(copy + strlen(key) + 1, value);
        if (line->gpu >= gpu_count && line->gpu < MAX_GPUS) gpu_count = line->gpu + 1;
    }
    if (file) fclose(file);
    for (int i = 0; i < MAX_HANDLES; i++) gpus[i] = (Gpu){i % MAX_GPUS, i / MAX_GPUS + WHOLE};
}

static const char *find(int gpu, const char *key) {
    for (int i = 0; i < line_count; i++)
        if (lines[i].gpu == gpu && !strcmp(lines[i].key, key)) return lines[i].value;
    return NULL;
}

static int host_number(const char *key) {
    const char *value = find(HOST, key);
    return value ? atoi(value) : 0;
}

/* The value of a GPU, or of its MIG instances, which are alike; NULL, and why, where there is none. */
static const char *value_of(const Gpu *gpu, const char *key, int *why) {
    char name[80];
    *why = INVALID_ARGUMENT;
    if (gpu < gpus || gpu >= gpus + MAX_HANDLES || gpu->index >= gpu_count) return NULL;
    snprintf(name, sizeof name, "%s%s", gpu->instance == WHOLE ? "" : "instance.", key);
    const char *error = find(gpu->index, "error"), *value = find(gpu->index, name);
    *why = error ? atoi(error) : value ? SUCCESS : NOT_SUPPORTED;
    return *why ? NULL : value;
}

static int number(const Gpu *gpu, const char *key, unsigned *out) {
    int why;
    const char *value = value_of(gpu, key, &why);
    if (value && out) *out = (unsigned)strtoul(value, NULL, 0);
    return why;
}

static int large(const Gpu *gpu, const char *key, unsigned long long *out) {
    int why;
    const char *value = value_of(gpu, key, &why);
    if (value && out) *out = strtoull(value, NULL, 0);
    return why;
}

static int selected(const Gpu *gpu, const char *key, unsigned which, unsigned *out) {
    char name[80];
    snprintf(name, sizeof name, "%s.%u", key, which);
    return number(gpu, name, out);
}

static int copied(const char *value, int why, char *out, unsigned length) {
    if (!value || !out) return why ? why : INVALID_ARGUMENT;
    if (strlen(value) >= length) return INSUFFICIENT_SIZE;
    strcpy(out, value);
    return SUCCESS;
}

static int text(const Gpu *gpu, const char *key, char *out, unsigned length) {
    int why;
    const char *value = value_of(gpu, key, &why);
    return copied(value, why, out, length);
}

#define EXPORT __attribute__((visibility("default"))) int
#define NONE(name) EXPORT name(void) { return NOT_SUPPORTED; }
#define NUMBER(name, key) EXPORT name(Gpu *gpu, unsigned *out) { return number(gpu, key, out); }
#define LARGE(name, key) EXPORT name(Gpu *gpu, unsigned long long *out) { return large(gpu, key, out); }
#define TEXT(name, key) EXPORT name(Gpu *gpu, char *out, unsigned length) { return text(gpu, key, out, length); }
#define SELECTED(name, key) EXPORT name(Gpu *gpu, unsigned which, unsigned *out) { return selected(gpu, key, which, out); }
#define PAIR(name, first, second)                            \
    EXPORT name(Gpu *gpu, unsigned *one, unsigned *other) {  \
        int why = number(gpu, first, one);                   \
        return why ? why : number(gpu, second, other);       \
    }

/* The host */

EXPORT nvmlInit_v2(void) { load(); return host_number("error"); }
EXPORT nvmlInitWithFlags(unsigned flags) { (void)flags; return nvmlInit_v2(); }
EXPORT nvmlShutdown(void) { return SUCCESS; }
EXPORT nvmlSystemGetDriverVersion(char *out, unsigned length) { return copied(find(HOST, "driver"), NOT_SUPPORTED, out, length); }
EXPORT nvmlSystemGetNVMLVersion(char *out, unsigned length) { return copied(find(HOST, "library"), NOT_SUPPORTED, out, length); }
EXPORT nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = host_number("cuda"); return *out ? SUCCESS : NOT_SUPPORTED; }
EXPORT nvmlDeviceGetCount_v2(unsigned *out) { *out = (unsigned)gpu_count; return SUCCESS; }
EXPORT nvmlGetExcludedDeviceCount(unsigned *out) { *out = 0; return SUCCESS; }
EXPORT nvmlUnitGetCount(unsigned *out) { *out = 0; return SUCCESS; }

__attribute__((visibility("default"))) const char *nvmlErrorString(int error) {
    static const char *known[] = {"Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded", "Timeout",
        "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found", "Corrupted infoROM", "GPU is lost",
        "GPU requires reset", "GPU access blocked by the operating system", "Driver/library version mismatch"};
    return error >= 0 && error < (int)(sizeof known / sizeof *known) ? known[error] : "Unknown Error";
}

/* nvidia-smi makes a set of events before it asks for anything; none ever comes. */
EXPORT nvmlEventSetCreate(void **out) { *out = gpus; return SUCCESS; }
EXPORT nvmlEventSetFree(void *set) { (void)set; return SUCCESS; }

/* One GPU */

static int handle(int index, Gpu **out) {
    if (index < 0 || index >= gpu_count) return INVALID_ARGUMENT;
    *out = &gpus[index];
    return SUCCESS;
}

EXPORT nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **out) { return handle((int)index, out); }
EXPORT nvmlDeviceGetHandleByPciBusId_v2(const char *text, Gpu **out) { /* in capitals or not, with four digits of the domain or eight */
    unsigned wanted[3], has[3];
    if (sscanf(text, "%x:%x:%x", &wanted[0], &wanted[1], &wanted[2]) != 3) return INVALID_ARGUMENT;
    for (int i = 0; i < gpu_count; i++) {
        const char *bus = find(i, "bus");
        if (bus && sscanf(bus, "%x:%x:%x", &has[0], &has[1], &has[2]) == 3 && !memcmp(wanted, has, sizeof has)) return handle(i, out);
    }
    return NOT_FOUND;
}
EXPORT nvmlDeviceGetIndex(Gpu *gpu, unsigned *out) { *out = (unsigned)(gpu->instance == WHOLE ? gpu->index : gpu->instance); return SUCCESS; }
EXPORT nvmlDeviceGetMinorNumber(Gpu *gpu, unsigned *out) { /* another than the index, where a GPU before it is missing */
    const char *value = find(gpu->index, "minor");
    *out = value ? (unsigned)atoi(value) : (unsigned)gpu->index;
    return SUCCESS;
}

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; } Pci;

static int pci_from(const char *bus, unsigned id, unsigned subsystem, Pci *out) {
    memset(out, 0, sizeof *out);
    if (sscanf(bus, "%x:%x:%x", &out->domain, &out->bus, &out->device) != 3) return NOT_SUPPORTED;
    snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:%02X.0", out->domain & 0xffff, out->bus & 0xff, out->device & 0xff);
    snprintf(out->text, sizeof out->text, "%08X:%02X:%02X.0", out->domain, out->bus & 0xff, out->device & 0xff);
    out->id = id;
    out->subsystem = subsystem;
    return SUCCESS;
}

EXPORT nvmlDeviceGetPciInfo_v3(Gpu *gpu, Pci *out) { /* also of a GPU that is lost: the kernel keeps its address */
    const char *bus = find(gpu->index, "bus"), *id = find(gpu->index, "pci.id"), *subsystem = find(gpu->index, "pci.subsystem");
    return bus ? pci_from(bus, id ? (unsigned)strtoul(id, NULL, 0) : 0, subsystem ? (unsigned)strtoul(subsystem, NULL, 0) : 0, out)
               : NOT_SUPPORTED;
}

typedef struct { unsigned version, domain, bus, device, id, subsystem, base_class, sub_class; char text[32]; } PciExt;

EXPORT nvmlDeviceGetPciInfoExt(Gpu *gpu, PciExt *out) {
    Pci pci;
    int why = nvmlDeviceGetPciInfo_v3(gpu, &pci);
    if (why) return why;
    out->domain = pci.domain, out->bus = pci.bus, out->device = pci.device, out->id = pci.id, out->subsystem = pci.subsystem;
    out->base_class = 3, out->sub_class = 2;
    memcpy(out->text, pci.text, sizeof out->text);
    return SUCCESS;
}

TEXT(nvmlDeviceGetName, "name")
EXPORT nvmlDeviceGetUUID(Gpu *gpu, char *out, unsigned length) {
    int why = text(gpu, "uuid", out, length);
    if (!why && gpu->instance != WHOLE) out[strlen("MIG-")] = (char)('0' + gpu->instance);
    return why;
}
TEXT(nvmlDeviceGetSerial, "serial")
TEXT(nvmlDeviceGetBoardPartNumber, "part_number")
TEXT(nvmlDeviceGetVbiosVersion, "vbios")
TEXT(nvmlDeviceGetInforomImageVersion, "inforom")
EXPORT nvmlDeviceGetGspFirmwareVersion(Gpu *gpu, char *out) { return text(gpu, "gsp", out, 64); }
NUMBER(nvmlDeviceGetBrand, "brand")
NUMBER(nvmlDeviceGetArchitecture, "architecture")
NUMBER(nvmlDeviceGetPersistenceMode, "persistence")
NUMBER(nvmlDeviceGetComputeMode, "compute_mode")
NUMBER(nvmlDeviceGetDisplayMode, "display")
NUMBER(nvmlDeviceGetDisplayActive, "display")
NUMBER(nvmlDeviceGetMultiGpuBoard, "multi_gpu_board")
NUMBER(nvmlDeviceGetModuleId, "module")
NUMBER(nvmlDeviceGetBoardId, "board")
NUMBER(nvmlDeviceGetVirtualizationMode, "virtualization")
NUMBER(nvmlDeviceGetFanSpeed, "fan")
NUMBER(nvmlDeviceGetPerformanceState, "pstate")
NUMBER(nvmlDeviceGetPowerState, "pstate")
NUMBER(nvmlDeviceGetPowerUsage, "power.draw")
NUMBER(nvmlDeviceGetPowerManagementMode, "power.managed")
NUMBER(nvmlDeviceGetPowerManagementLimit, "power.limit")
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power.limit")
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, "power.default")
PAIR(nvmlDeviceGetPowerManagementLimitConstraints, "power.min", "power.max")
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie.generation")
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie.max_generation")
NUMBER(nvmlDeviceGetGpuMaxPcieLinkGeneration, "pcie.max_generation")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie.width")
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie.max_width")
NUMBER(nvmlDeviceGetPcieReplayCounter, "pcie.replays")
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, "retirement_pending")
NUMBER(nvmlDeviceGetMaxMigDeviceCount, "mig.max")
SELECTED(nvmlDeviceGetTemperature, "temperature")
SELECTED(nvmlDeviceGetTemperatureThreshold, "threshold")
SELECTED(nvmlDeviceGetClockInfo, "clock")
SELECTED(nvmlDeviceGetMaxClockInfo, "max_clock")
SELECTED(nvmlDeviceGetApplicationsClock, "set_clock")
SELECTED(nvmlDeviceGetDefaultApplicationsClock, "default_clock")
PAIR(nvmlDeviceGetEccMode, "ecc", "ecc.pending")
PAIR(nvmlDeviceGetMigMode, "mig", "mig.pending")
PAIR(nvmlDeviceGetCudaComputeCapability, "capability.major", "capability.minor")
PAIR(nvmlDeviceGetGspFirmwareMode, "gsp.enabled", "gsp.enabled")
EXPORT nvmlDeviceGetUtilizationRates(Gpu *gpu, unsigned out[2]) { out[1] = 0; return number(gpu, "utilization", out); }
LARGE(nvmlDeviceGetCurrentClocksThrottleReasons, "throttled")
LARGE(nvmlDeviceGetSupportedClocksThrottleReasons, "throttle_reasons")

typedef struct { unsigned long long total, free, used; } Bar1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;

EXPORT nvmlDeviceGetMemoryInfo_v2(Gpu *gpu, Memory *out) {
    int why = large(gpu, "memory", &out->total);
    out->reserved = out->used = 0;
    if (!why) large(gpu, "memory.reserved", &out->reserved);
    out->free = out->total - out->reserved;
    return why;
}
EXPORT nvmlDeviceGetBAR1MemoryInfo(Gpu *gpu, Bar1 *out) {
    int why = large(gpu, "bar1", &out->total);
    out->free = out->total;
    out->used = 0;
    return why;
}

EXPORT nvmlDeviceGetRemappedRows(Gpu *gpu, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failed) {
    int why = number(gpu, "remapped.correctable", correctable);
    if (!why) why = number(gpu, "remapped.uncorrectable", uncorrectable);
    if (!why) why = number(gpu, "remapped.pending", pending);
    return why ? why : number(gpu, "remapped.failed", failed);
}
static int ecc(const Gpu *gpu, const char *place, unsigned kind, unsigned counter, unsigned long long *out) {
    char key[80]; /* ecc.uncorrectable.volatile.dram */
    snprintf(key, sizeof key, "ecc.%scorrectable.%s.%s", kind ? "un" : "", counter ? "aggregate" : "volatile", place);
    return large(gpu, key, out);
}
EXPORT nvmlDeviceGetTotalEccErrors(Gpu *gpu, unsigned kind, unsigned counter, unsigned long long *out) {
    return ecc(gpu, "total", kind, counter, out);
}
EXPORT nvmlDeviceGetMemoryErrorCounter(Gpu *gpu, unsigned kind, unsigned counter, unsigned place, unsigned long long *out) {
    static const char *places[] = {"l1", "l2", "dram", "registers", "texture", "texture_shared", "cbu", "sram"};
    return place < 8 ? ecc(gpu, places[place], kind, counter, out) : NOT_SUPPORTED;
}
EXPORT nvmlDeviceGetRetiredPages(Gpu *gpu, unsigned cause, unsigned *count, unsigned long long *addresses) {
    (void)addresses;
    return selected(gpu, "retired_pages", cause, count);
}
EXPORT nvmlDeviceGetRetiredPages_v2(Gpu *gpu, unsigned cause, unsigned *count, unsigned long long *addresses, void *times) {
    (void)times;
    return nvmlDeviceGetRetiredPages(gpu, cause, count, addresses);
}

/* Fields by number (nvml.h: NVML_FI_…); a scope is the number of a link, or what a field's own text says. */

typedef struct {
    unsigned id, scope;
    long long time, latency;
    unsigned kind;
    int result;
    unsigned long long value;
} Field;

EXPORT nvmlDeviceGetFieldValues(Gpu *gpu, int count, Field *fields) {
    for (int i = 0; i < count; i++) {
        char key[80];
        fields[i].time = fields[i].latency = 0;
        fields[i].kind = 1; /* unsigned int */
        fields[i].value = 0;
        snprintf(key, sizeof key, "field.%u.%u", fields[i].id, fields[i].scope);
        fields[i].result = large(gpu, key, &fields[i].value);
        if (fields[i].result == NOT_SUPPORTED) {
            snprintf(key, sizeof key, "field.%u", fields[i].id);
            fields[i].result = large(gpu, key, &fields[i].value);
        }
    }
    return SUCCESS;
}

/* NVLink */

EXPORT nvmlDeviceGetNvLinkRemotePciInfo_v2(Gpu *gpu, unsigned link, Pci *out) {
    char key[80];
    int why;
    snprintf(key, sizeof key, "nvlink.remote.%u", link);
    const char *bus = value_of(gpu, key, &why);
    return bus ? pci_from(bus, 0, 0, out) : why;
}
EXPORT nvmlDeviceGetTopologyCommonAncestor(Gpu *one, Gpu *other, unsigned *out) {
    return selected(one, "topology", (unsigned)other->index, out);
}
EXPORT nvmlDeviceGetP2PStatus(Gpu *one, Gpu *other, unsigned which, unsigned *out) {
    (void)which;
    return selected(one, "p2p", (unsigned)other->index, out);
}

typedef struct { unsigned char cluster[16]; int status; unsigned clique; unsigned char state; } Fabric;
typedef struct { unsigned version; unsigned char cluster[16]; int status; unsigned clique; unsigned char state; unsigned health; } FabricV;

static int fabric(const Gpu *gpu, unsigned char *cluster, int *status, unsigned *clique, unsigned char *state) {
    unsigned value = 0, byte;
    int why = number(gpu, "fabric.state", &value);
    if (why) return why;
    *state = (unsigned char)value;
    number(gpu, "fabric.status", (unsigned *)status);
    number(gpu, "fabric.clique", clique);
    const char *digits = value_of(gpu, "fabric.cluster", &why);
    for (int i = 0; digits && i < 16 && strlen(digits) >= 2 * ((size_t)i + 1) && sscanf(digits + 2 * i, "%2x", &byte) == 1; i++) cluster[i] = (unsigned char)byte;
    return SUCCESS;
}
EXPORT nvmlDeviceGetGpuFabricInfo(Gpu *gpu, Fabric *out) {
    memset(out, 0, sizeof *out);
    return fabric(gpu, out->cluster, &out->status, &out->clique, &out->state);
}
EXPORT nvmlDeviceGetGpuFabricInfoV(Gpu *gpu, FabricV *out) {
    int why = fabric(gpu, out->cluster, &out->status, &out->clique, &out->state);
    out->health = 0;
    if (!why) number(gpu, "fabric.health", &out->health);
    return why;
}

/* MIG */

enum { FIRST_GPU_INSTANCE = 7 }; /* the driver numbers the smallest instances of a GPU from 7 on */

EXPORT nvmlDeviceGetMigDeviceHandleByIndex(Gpu *gpu, unsigned index, Gpu **out) {
    unsigned count = 0;
    int why = number(gpu, "mig.instances", &count);
    if (why || index >= count || index >= MAX_INSTANCES) return NOT_FOUND;
    *out = &gpus[MAX_GPUS * (1 + (int)index) + gpu->index];
    return SUCCESS;
}
EXPORT nvmlDeviceIsMigDeviceHandle(Gpu *gpu, unsigned *out) { *out = gpu->instance != WHOLE; return SUCCESS; }
EXPORT nvmlDeviceGetGpuInstanceId(Gpu *gpu, unsigned *out) {
    *out = FIRST_GPU_INSTANCE + (unsigned)gpu->instance;
    return gpu->instance == WHOLE ? NOT_SUPPORTED : SUCCESS;
}
EXPORT nvmlDeviceGetComputeInstanceId(Gpu *gpu, unsigned *out) { *out = 0; return gpu->instance == WHOLE ? NOT_SUPPORTED : SUCCESS; }

typedef struct { unsigned processors, copy, decoder, encoder, jpeg, flow, gpu_slices, compute_slices; unsigned long long memory_mb; } Attributes;

EXPORT nvmlDeviceGetAttributes_v2(Gpu *gpu, Attributes *out) {
    memset(out, 0, sizeof *out);
    out->copy = out->gpu_slices = out->compute_slices = 1;
    return number(gpu, "processors", &out->processors);
}

/* What else nvidia-smi asks for; without these it would show "Function Not Found". */

NONE(nvmlDeviceGetAccountingBufferSize) NONE(nvmlDeviceGetAccountingMode) NONE(nvmlDeviceGetAccountingPids)
NONE(nvmlDeviceGetAutoBoostedClocksEnabled) NONE(nvmlDeviceGetBridgeChipInfo) NONE(nvmlDeviceGetC2cModeInfoV) NONE(nvmlDeviceGetClock)
NONE(nvmlDeviceGetConfComputeProtectedMemoryUsage) NONE(nvmlDeviceGetCpuAffinity) NONE(nvmlDeviceGetDecoderUtilization)
NONE(nvmlDeviceGetDriverModel) NONE(nvmlDeviceGetEncoderStats) NONE(nvmlDeviceGetEncoderUtilization) NONE(nvmlDeviceGetFBCStats)
NONE(nvmlDeviceGetGpuOperationMode) NONE(nvmlDeviceGetGridLicensableFeatures_v4) NONE(nvmlDeviceGetHostVgpuMode)
NONE(nvmlDeviceGetInforomVersion) NONE(nvmlDeviceGetJpgUtilization) NONE(nvmlDeviceGetLastBBXFlushTime) NONE(nvmlDeviceGetMemoryAffinity)
NONE(nvmlDeviceGetNumaNodeId) NONE(nvmlDeviceGetOfaUtilization) NONE(nvmlDeviceGetRowRemapperHistogram)
NONE(nvmlDeviceGetSramEccErrorStatus) NONE(nvmlDeviceGetSupportedMemoryClocks) NONE(nvmlDeviceGetVgpuHeterogeneousMode)
NONE(nvmlDeviceValidateInforom)

/* nvidia-smi asks for a table of functions that no header names. It needs four of them; the rest do nothing, or are not supported. */

enum { SLOTS = 512, COMMON_ANCESTOR = 23, HANDLE_BY_INDEX = 81, FIRST_PROCESSES = 213, LAST_PROCESSES = 215 };

static int unnamed(const Gpu *gpu) { return gpu >= gpus && gpu < gpus + MAX_HANDLES ? NOT_SUPPORTED : SUCCESS; }
static int unnamed_handle(uintptr_t index, Gpu **out) { return handle((int)index, out); }
static int unnamed_ancestor(const char *one, const char *other, unsigned *out) { /* NVML's 10 is its 0, 20 its 1, … */
    Gpu *from, *to;
    int why = nvmlDeviceGetHandleByPciBusId_v2(one, &from);
    if (!why) why = nvmlDeviceGetHandleByPciBusId_v2(other, &to);
    if (!why) why = nvmlDeviceGetTopologyCommonAncestor(from, to, out);
    if (!why) *out = *out / 10 - 1;
    return why;
}
static int unnamed_processes(const Gpu *gpu, unsigned *count) { (void)gpu; *count = 0; return SUCCESS; }

EXPORT nvmlInternalGetExportTable(const void **out, const void *id) {
    static uintptr_t table[SLOTS];
    (void)id;
    for (int slot = 1; slot < SLOTS; slot++) table[slot] = (uintptr_t)unnamed;
    for (int slot = FIRST_PROCESSES; slot <= LAST_PROCESSES; slot++) table[slot] = (uintptr_t)unnamed_processes;
    table[COMMON_ANCESTOR] = (uintptr_t)unnamed_ancestor;
    table[HANDLE_BY_INDEX] = (uintptr_t)unnamed_handle;
    table[0] = sizeof table;
    *out = table;
    return SUCCESS;
}

/* CUDA: the driver's library is there, and finds no GPU. */

EXPORT cuDriverGetVersion(int *out) { load(); *out = host_number("cuda"); return SUCCESS; }
EXPORT cuInit(unsigned flags) { (void)flags; return 100; /* CUDA_ERROR_NO_DEVICE */ }

/* What PyTorch's libraries are linked with. Nothing gets there without cuInit. */
#define UNINITIALIZED_CUDA(name) EXPORT name(void) { return 3; /* CUDA_ERROR_NOT_INITIALIZED */ }
UNINITIALIZED_CUDA(cuCtxGetCurrent) UNINITIALIZED_CUDA(cuCtxSetCurrent) UNINITIALIZED_CUDA(cuDeviceGet)
UNINITIALIZED_CUDA(cuDeviceGetAttribute) UNINITIALIZED_CUDA(cuDevicePrimaryCtxGetState) UNINITIALIZED_CUDA(cuDevicePrimaryCtxRetain)
UNINITIALIZED_CUDA(cuFuncGetAttribute) UNINITIALIZED_CUDA(cuFuncSetAttribute) UNINITIALIZED_CUDA(cuFuncSetCacheConfig)
UNINITIALIZED_CUDA(cuGetErrorString) UNINITIALIZED_CUDA(cuLaunchCooperativeKernel) UNINITIALIZED_CUDA(cuLaunchKernel)
UNINITIALIZED_CUDA(cuLinkAddData_v2) UNINITIALIZED_CUDA(cuLinkComplete) UNINITIALIZED_CUDA(cuLinkCreate_v2)
UNINITIALIZED_CUDA(cuModuleGetFunction) UNINITIALIZED_CUDA(cuModuleLoad) UNINITIALIZED_CUDA(cuModuleLoadData)
UNINITIALIZED_CUDA(cuModuleLoadDataEx) UNINITIALIZED_CUDA(cuModuleUnload) UNINITIALIZED_CUDA(cuOccupancyMaxActiveBlocksPerMultiprocessor)
UNINITIALIZED_CUDA(cuPointerGetAttribute) UNINITIALIZED_CUDA(cuTensorMapEncodeTiled)
