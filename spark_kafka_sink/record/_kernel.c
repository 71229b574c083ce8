/* Records to bytes (format v2), one after the other, in the order of the runs. The numpy twin in encoder.py gives the
 * same bytes, for installations without this module.
 *
 * It reads only buffers: Arrow's 32-bit offsets, data and validity bits. It has no state but its types, and releases the
 * GIL while it works. Every length is checked against the buffers before it is used; a length that does not fit is a
 * ValueError, never a write.
 */
#include "_kernel.h"
#include <stdint.h>
#include <string.h>

typedef struct {
    const uint8_t *offsets; /* rows + 1 of 32 bits, at any address */
    const uint8_t *data;
    int64_t data_size;
    const uint8_t *valid; /* bits, or NULL if no row is null */
    int64_t valid_from;   /* the bit of row 0 */
} column;

static inline uint64_t zigzag(int64_t number) { return ((uint64_t)number << 1) ^ (uint64_t)(number >> 63); }

static inline int64_t width(uint64_t zigzagged)
{
    int64_t bytes = 1;
    while (zigzagged >>= 7)
        bytes++;
    return bytes;
}

static inline uint8_t *put(uint8_t *at, uint64_t zigzagged)
{
    while (zigzagged >= 0x80) {
        *at++ = (uint8_t)(zigzagged | 0x80);
        zigzagged >>= 7;
    }
    *at++ = (uint8_t)zigzagged;
    return at;
}

/* Buffers may be unaligned. A compiler makes one load of each of these. */
static inline int32_t offset_at(const column *from, int64_t row)
{
    int32_t offset;
    memcpy(&offset, from->offsets + 4 * row, sizeof offset);
    return offset;
}

static inline int64_t number_at(const uint8_t *numbers, int64_t index)
{
    int64_t number;
    memcpy(&number, numbers + 8 * index, sizeof number);
    return number;
}

/* Returns the length of the value, -1 for a null, -2 if the offsets do not fit the data. `*bytes` points to the value.
 * The offsets are read only once, because another thread may change them between two reads. */
static inline int64_t length_of(const column *from, int64_t row, const uint8_t **bytes)
{
    *bytes = from->data;
    if (from->valid != NULL) {
        int64_t bit = from->valid_from + row;
        if (!(from->valid[bit >> 3] >> (bit & 7) & 1))
            return -1;
    }
    int64_t start = offset_at(from, row), end = offset_at(from, row + 1);
    if (start < 0 || end < start || end > from->data_size)
        return -2;
    if (end > start)
        *bytes += start;
    return end - start;
}

static inline uint8_t *put_bytes(uint8_t *at, const uint8_t *bytes, int64_t length)
{
    at = put(at, zigzag(length));
    if (length > 0) {
        memmove(at, bytes, (size_t)length); /* `out` may overlap the input */
        at += length;
    }
    return at;
}

typedef struct {
    const uint8_t *order; /* numbers of 64 bits, as those below: the row at each place, or NULL: the place itself */
    const uint8_t *times; /* by place, or NULL: `now` everywhere */
    const uint8_t *counts; /* headers by row, or NULL: none anywhere */
    int64_t now, rows, places;
    int has_key, has_value;
    column key, value, headers;
} records;

/* Each block is new, so its rows are not in a cache, and most of the time goes into waiting for memory. These prefetches
 * cover what the processor cannot predict: the next rows of a partition, and addresses beyond the end of a page. They
 * stand in the loop itself, because GCC drops a function that only prefetches. */
#ifdef __GNUC__
#define FETCH(address, to_write) __builtin_prefetch((const void *)(address), to_write)
#else
#define FETCH(address, to_write) ((void)(address))
#endif
enum { PLACES_AHEAD = 6, BYTES_AHEAD = 1024, LINE = 64 };

static inline uintptr_t address_of(const column *from, int64_t row)
{
    return from->offsets == NULL ? 0 : (uintptr_t)from->data + (uintptr_t)offset_at(from, row);
}

/* Returns the end of the written bytes, or NULL if a length does not fit. */
static uint8_t *put_run(const records *of, const uint8_t *run, uint8_t *at, const uint8_t *end)
{
    const int64_t first = number_at(run, 0), last = number_at(run, 1);
    const uint64_t base_offset = (uint64_t)number_at(run, 2), base_time = (uint64_t)number_at(run, 3);
    if (first < 0 || last > of->places) /* checked before, but another thread may have changed it */
        return NULL;
    for (int64_t place = first; place < last; place++) {
        int64_t row = of->order == NULL ? place : number_at(of->order, place);
        if (row < 0 || row >= of->rows)
            return NULL;
        if (of->order == NULL) {
            uintptr_t value = address_of(&of->value, row) + BYTES_AHEAD;
            FETCH(value, 0);
            FETCH(value + LINE, 0);
            FETCH((uintptr_t)at + BYTES_AHEAD, 1);
            FETCH((uintptr_t)at + BYTES_AHEAD + LINE, 1);
        } else if (place + PLACES_AHEAD < of->places) {
            int64_t next = number_at(of->order, place + PLACES_AHEAD);
            if (next >= 0 && next < of->rows) {
                uintptr_t value = address_of(&of->value, next);
                FETCH(value, 0);
                FETCH(value + LINE, 0);
                FETCH(value + 2 * LINE, 0);
                FETCH(address_of(&of->key, next), 0);
            }
        }
        uint64_t offset = zigzag((int64_t)(base_offset + (uint64_t)(place - first)));
        uint64_t time = zigzag((int64_t)((uint64_t)(of->times == NULL ? of->now : number_at(of->times, place)) - base_time));
        const uint8_t *key_bytes = NULL, *value_bytes = NULL, *header_bytes = NULL;
        int64_t key = of->has_key ? length_of(&of->key, row, &key_bytes) : -1;
        int64_t value = of->has_value ? length_of(&of->value, row, &value_bytes) : -1;
        int64_t count = 0, headers = 0;
        if (of->counts != NULL) {
            count = number_at(of->counts, row);
            headers = length_of(&of->headers, row, &header_bytes);
            if (headers == -1)
                headers = 0;
        }
        if (key == -2 || value == -2 || headers == -2)
            return NULL;
        int64_t body = 1 + width(time) + width(offset) + width(zigzag(key)) + (key > 0 ? key : 0)
                       + width(zigzag(value)) + (value > 0 ? value : 0) + width(zigzag(count)) + headers;
        if (end - at < body + 10)
            return NULL;
        at = put(at, zigzag(body));
        *at++ = 0; /* attributes */
        at = put(at, time);
        at = put(at, offset);
        at = key < 0 ? put(at, zigzag(-1)) : put_bytes(at, key_bytes, key);
        at = value < 0 ? put(at, zigzag(-1)) : put_bytes(at, value_bytes, value);
        at = put(at, zigzag(count));
        if (headers > 0) {
            memmove(at, header_bytes, (size_t)headers);
            at += headers;
        }
    }
    return at;
}

/* Kafka's hash of a key (org.apache.kafka.common.utils.Utils.murmur2). */
static uint32_t murmur2(const uint8_t *key, int64_t length)
{
    const uint32_t m = 0x5BD1E995;
    uint32_t hash = 0x9747B28C ^ (uint32_t)length, word;
    for (; length >= 4; key += 4, length -= 4) {
        word = (key[0] | (uint32_t)key[1] << 8 | (uint32_t)key[2] << 16 | (uint32_t)key[3] << 24) * m;
        hash = hash * m ^ (word ^ word >> 24) * m;
    }
    if (length > 0) {
        for (word = 0; length > 0; length--)
            word = word << 8 | key[length - 1];
        hash = (hash ^ word) * m;
    }
    hash = (hash ^ hash >> 13) * m;
    return hash ^ hash >> 15;
}

/* The finalizer of splitmix64: each bit of the result depends on every bit of `word`. */
static inline uint64_t mixed(uint64_t word)
{
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
    word = (word ^ word >> 27) * 0x94D049BB133111EBu;
    return word ^ word >> 31;
}

static inline uint64_t word_at(const uint8_t *at)
{
    return at[0] | (uint64_t)at[1] << 8 | (uint64_t)at[2] << 16 | (uint64_t)at[3] << 24 | (uint64_t)at[4] << 32
           | (uint64_t)at[5] << 40 | (uint64_t)at[6] << 48 | (uint64_t)at[7] << 56;
}

/* See fingerprint.py, whose numpy form gives the same number. */
static uint64_t field_hash(const uint8_t *at, int64_t length, uint64_t salt)
{
    const uint64_t step = 0x9E3779B97F4A7C15u;
    if (length < 0)
        return mixed(salt ^ step);
    uint64_t sum = salt + (uint64_t)length, key = salt;
    int64_t left = length;
    for (; left >= 8; at += 8, left -= 8)
        sum += mixed(word_at(at) + (key += step));
    if (left > 0) {
        uint8_t last[8] = {0};
        memcpy(last, at, (size_t)left);
        sum += mixed(word_at(last) + (key += step));
    }
    return mixed(sum);
}

/* ---- Python's side: chunks out ---------------------------------------------------------------------------------- */

/* The bytes of a run, read only. Cheaper to make and to free than a slice of a memoryview: a block has one for each of
 * its partitions. */
typedef struct {
    PyObject_HEAD
    PyObject *block; /* a memoryview of `out`, which keeps `out` in its place */
    uint8_t *start;
    Py_ssize_t size;
} chunk;

static void chunk_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_DECREF(((chunk *)self)->block);
    PyObject_Free(self);
    Py_DECREF(type);
}

static Py_ssize_t chunk_length(PyObject *self) { return ((chunk *)self)->size; }

static int chunk_buffer(PyObject *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, self, ((chunk *)self)->start, ((chunk *)self)->size, 1, flags);
}

static PyType_Slot chunk_slots[] = {
    {Py_tp_doc, "The bytes of a run; keeps those of its whole block. To be had from encode."},
    {Py_tp_dealloc, chunk_dealloc},
    {Py_sq_length, chunk_length},
    {Py_bf_getbuffer, chunk_buffer},
    {0, NULL},
};

static PyType_Spec chunk_spec = {"spark_kafka_sink.record._kernel.Chunk", sizeof(chunk), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, chunk_slots};

typedef struct {
    PyTypeObject *chunk_type;
} state;

/* Returns a list of one chunk for each run. `ends`: the end of each run, from `start`. */
static PyObject *chunks_of(PyTypeObject *type, PyObject *out, uint8_t *start, const int64_t *ends, int64_t runs)
{
    PyObject *block = PyMemoryView_FromObject(out);
    PyObject *made = block == NULL ? NULL : PyList_New((Py_ssize_t)runs);
    int64_t begin = 0;
    for (int64_t index = 0; index < runs && made != NULL; index++) {
        chunk *of_run = PyObject_New(chunk, type);
        if (of_run == NULL) {
            Py_CLEAR(made);
            break;
        }
        Py_INCREF(block);
        of_run->block = block;
        of_run->start = start + begin;
        of_run->size = (Py_ssize_t)(ends[index] - begin);
        begin = ends[index];
        PyList_SetItem(made, (Py_ssize_t)index, (PyObject *)of_run);
    }
    Py_XDECREF(block);
    return made;
}

/* ---- Python's side: buffers in, checked ------------------------------------------------------------------------- */

enum { ORDER, TIMES, COUNTS, RUNS, OUT, COLUMNS, VIEWS = COLUMNS + 9 };
static const int64_t MOST = (int64_t)1 << 59; /* as many items of any size are an int64 in bytes */

/* Gets a view of the bytes of `object`, empty for None. */
static int view_of(PyObject *object, Py_buffer *view, int flags)
{
    if (object == Py_None) {
        memset(view, 0, sizeof *view);
        return 0;
    }
    return PyObject_GetBuffer(object, view, flags);
}

static int has_size(const Py_buffer *view, int64_t bytes, const char *name)
{
    if (view->buf != NULL && view->len < bytes) {
        PyErr_Format(PyExc_ValueError, "%s has %zd bytes, less than %lld", name, view->len, (long long)bytes);
        return 0;
    }
    return 1;
}

static int column_of(Py_buffer views[3], int64_t valid_from, int64_t rows, column *made, const char *name)
{
    if (!has_size(&views[0], 4 * (rows + 1), name) || !has_size(&views[2], (valid_from + rows + 7) / 8, name))
        return 0;
    made->offsets = views[0].buf;
    made->data = views[1].buf;
    made->data_size = views[1].len;
    made->valid = views[2].buf;
    made->valid_from = valid_from;
    return 1;
}

static PyObject *encode(PyObject *module, PyObject *arguments)
{
    PyObject *given[VIEWS];
    long long rows, now, key_from, value_from;
    if (!PyArg_ParseTuple(
            arguments, "LLOOOOO(OOOL)(OOOL)(OO)", &rows, &now, &given[ORDER], &given[TIMES], &given[COUNTS],
            &given[RUNS], &given[OUT], &given[COLUMNS], &given[COLUMNS + 1], &given[COLUMNS + 2], &key_from,
            &given[COLUMNS + 3], &given[COLUMNS + 4], &given[COLUMNS + 5], &value_from, &given[COLUMNS + 6],
            &given[COLUMNS + 7]))
        return NULL;
    given[COLUMNS + 8] = Py_None; /* headers are never null */
    Py_buffer views[VIEWS];
    int taken = 0;
    PyObject *result = NULL;
    int64_t *ends = NULL;
    for (; taken < VIEWS; taken++) {
        int flags = taken == OUT ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        if (view_of(given[taken], &views[taken], flags) < 0)
            goto release;
    }
    int64_t runs = views[RUNS].len / 32, places = 0;
    const uint8_t *run = views[RUNS].buf;
    for (int64_t index = 0; index < runs; index++) {
        int64_t first = number_at(run, 4 * index), last = number_at(run, 4 * index + 1);
        if (first < places || last < first) {
            PyErr_SetString(PyExc_ValueError, "runs must ascend without overlap");
            goto release;
        }
        places = last;
    }
    if (places > MOST || rows < 0 || rows > MOST || key_from < 0 || key_from > MOST || value_from < 0 || value_from > MOST) {
        PyErr_SetString(PyExc_ValueError, "a number of rows is out of bounds");
        goto release;
    }
    records of = {.order = views[ORDER].buf, .times = views[TIMES].buf, .counts = views[COUNTS].buf, .now = now,
                  .rows = rows, .places = places, .has_key = views[COLUMNS].buf != NULL,
                  .has_value = views[COLUMNS + 3].buf != NULL};
    if (of.counts != NULL && views[COLUMNS + 6].buf == NULL) {
        PyErr_SetString(PyExc_ValueError, "headers have counts and no offsets");
        goto release;
    }
    if (of.order == NULL && places > rows) {
        PyErr_SetString(PyExc_ValueError, "runs go past the last row");
        goto release;
    }
    if (!has_size(&views[ORDER], 8 * places, "order") || !has_size(&views[TIMES], 8 * places, "times")
        || !has_size(&views[COUNTS], 8 * rows, "counts")
        || !column_of(&views[COLUMNS], key_from, rows, &of.key, "key")
        || !column_of(&views[COLUMNS + 3], value_from, rows, &of.value, "value")
        || !column_of(&views[COLUMNS + 6], 0, rows, &of.headers, "headers"))
        goto release;
    ends = PyMem_Calloc((size_t)runs, sizeof *ends);
    if (ends == NULL) {
        PyErr_NoMemory();
        goto release;
    }
    uint8_t *start = views[OUT].buf, *at = start;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t index = 0; index < runs && at != NULL; index++) {
        at = put_run(&of, run + 32 * index, at, start + views[OUT].len);
        if (at != NULL)
            ends[index] = at - start;
    }
    Py_END_ALLOW_THREADS
    if (at == NULL)
        PyErr_SetString(PyExc_ValueError, "a row, a length or the room for the records is out of bounds");
    else
        result = chunks_of(((state *)PyModule_GetState(module))->chunk_type, given[OUT], start, ends, runs);
release:
    PyMem_Free(ends);
    while (taken-- > 0)
        if (views[taken].obj != NULL)
            PyBuffer_Release(&views[taken]);
    return result;
}

static PyObject *hash(PyObject *module, PyObject *arguments)
{
    PyObject *given[3];
    if (!PyArg_ParseTuple(arguments, "OOO", &given[0], &given[1], &given[2]))
        return NULL;
    Py_buffer views[3];
    int taken = 0;
    PyObject *result = NULL;
    for (; taken < 3; taken++)
        if (PyObject_GetBuffer(given[taken], &views[taken], taken == 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            goto release;
    int64_t rows = views[2].len / 4, row = 0;
    column keys = {.offsets = views[0].buf, .data = views[1].buf, .data_size = views[1].len};
    if (!has_size(&views[0], 4 * (rows + 1), "key"))
        goto release;
    Py_BEGIN_ALLOW_THREADS
    for (uint8_t *hashed = views[2].buf; row < rows; row++) {
        const uint8_t *bytes;
        int64_t length = length_of(&keys, row, &bytes);
        if (length < 0)
            break;
        uint32_t made = murmur2(bytes, length);
        memcpy(hashed + 4 * row, &made, sizeof made);
    }
    Py_END_ALLOW_THREADS
    if (row < rows)
        PyErr_SetString(PyExc_ValueError, "a key is out of bounds");
    else
        result = Py_NewRef(Py_None);
release:
    while (taken-- > 0)
        PyBuffer_Release(&views[taken]);
    return result;
}

static PyObject *fingerprint(PyObject *module, PyObject *arguments)
{
    PyObject *given[4];
    long long valid_from;
    unsigned long long salt;
    if (!PyArg_ParseTuple(arguments, "OOOLKO", &given[0], &given[1], &given[2], &valid_from, &salt, &given[3]))
        return NULL;
    Py_buffer views[4];
    int taken = 0;
    PyObject *result = NULL;
    for (; taken < 4; taken++)
        if (view_of(given[taken], &views[taken], taken == 3 ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            goto release;
    int64_t rows = views[3].len / 8, row = 0;
    column fields;
    if (valid_from < 0 || valid_from > MOST || views[0].buf == NULL) {
        PyErr_SetString(PyExc_ValueError, "the offsets are missing, or the first row is out of bounds");
        goto release;
    }
    if (!column_of(views, valid_from, rows, &fields, "column"))
        goto release;
    Py_BEGIN_ALLOW_THREADS
    for (uint8_t *sums = views[3].buf; row < rows; row++) {
        const uint8_t *bytes = NULL;
        int64_t length = length_of(&fields, row, &bytes);
        if (length == -2)
            break;
        uint64_t hashed = field_hash(bytes, length, salt), sum;
        memcpy(&sum, sums + 8 * row, sizeof sum); /* may be unaligned */
        sum += hashed;
        memcpy(sums + 8 * row, &sum, sizeof sum);
    }
    Py_END_ALLOW_THREADS
    if (row < rows)
        PyErr_SetString(PyExc_ValueError, "a length is out of bounds");
    else
        result = Py_NewRef(Py_None);
release:
    while (taken-- > 0)
        if (views[taken].obj != NULL)
            PyBuffer_Release(&views[taken]);
    return result;
}

static PyMethodDef methods[] = {
    {"fingerprint", fingerprint, METH_VARARGS, "Add the hash of each row's bytes to its sum. See fingerprint.py."},
    {"hash", hash, METH_VARARGS, "Write the hash of each key as 32 bits: offsets, data, room. See partitioning.py."},
    {"encode", encode, METH_VARARGS, "Write the records of all runs; returns a list of their chunks. See block.py."},
    {NULL, NULL, 0, NULL},
};

static int start_module(PyObject *module)
{
    state *own = PyModule_GetState(module);
    own->chunk_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &chunk_spec, NULL);
    if (own->chunk_type == NULL || PyModule_AddType(module, own->chunk_type) < 0)
        return -1;
    return add_row_taker(module) < 0 ? -1 : add_encode_rows(module);
}

static int visit_module(PyObject *module, visitproc visit, void *arg)
{
    state *own = PyModule_GetState(module);
    if (own != NULL)
        Py_VISIT(own->chunk_type);
    return 0;
}

static int clear_module(PyObject *module)
{
    state *own = PyModule_GetState(module);
    if (own != NULL)
        Py_CLEAR(own->chunk_type);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, start_module}, {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernel", NULL, sizeof(state), methods, module_slots,
                                        visit_module, clear_module, NULL};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }
